"""Several drafters under one verifier: each drafts if the sources before it promise less."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from selfspec.arguments import shown
from selfspec.draft.draft import Budget, Draft, Verdict
from selfspec.draft.drafter import MODEL, Drafter, Proposer
from selfspec.draft.rows_view import RowsView, filled_up, lengths_of
from selfspec.errors import DraftConfigError
from selfspec.runtime.request import PassResult


@dataclass(frozen=True, init=False)
class Cascade(Drafter):
    """Takes the draft of the first of its `sources` that promises more than the sources behind it.

    The measure is the tokens that recent rounds with each match length committed for their cost. A source that runs a
    model is asked only if no earlier draft is taken; all learn from every round. Where rows are apart (see
    `FixedLength`), each row chooses and learns separately.
    """

    sources: tuple[Drafter, ...]

    def __init__(self, *sources: Drafter) -> None:
        """Take two or more sources, in the order in which they are asked; a cascade stands for its own sources.

        Raises:
            DraftConfigError: a source is no drafter or comes twice, there are fewer than two, or two run a model.
        """
        wrong = [source for source in sources if not isinstance(source, Drafter)]
        flat = tuple(chain(*(each.sources if isinstance(each, Cascade) else (each,) for each in sources)))
        twice = any(source in flat[:place] for place, source in enumerate(flat))
        if wrong or len(flat) < 2:
            raise DraftConfigError(
                "a cascade is of two or more different drafters, e.g. Cascade(PromptLookup(), "
                f"EarlyExit(layer=4)); got {shown(list(sources))}"
            )
        named = " and ".join(source.spelling or shown(source) for source in flat)
        if twice:
            raise DraftConfigError(f"name each draft once; got {named}")
        if sum(source.runs != "nothing" for source in flat) > 1:
            raise DraftConfigError(
                f"in a cascade at most one draft runs a model, and here several do: {named}; take one of "
                "them, `selfspec bench` compares them; a head that guesses for int8 would gain 4 % where 0.36 of its "
                "tokens are right (docs/heads.md)"
            )
        format = next((source.format for source in flat if source.format is not None), None)
        runs = next((source.runs for source in flat if source.runs != "nothing"), "nothing")
        for name, value in {"sources": flat, "format": format, "runs": runs}.items():
            object.__setattr__(self, name, value)

    def mapped(self, change: Callable[[Drafter], Drafter]) -> Drafter:
        return Cascade(*(source.mapped(change) for source in self.sources))

    @property
    def spelling(self) -> str | None:
        names = [source.spelling for source in self.sources]
        return None if None in names else "+".join(filter(None, names))

    def begin(self, rows: RowsView) -> CascadeProposer:
        return CascadeProposer([source.begin(rows) for source in self.sources])


class CascadeProposer(Proposer):
    """Proposes the draft of one source."""

    def __init__(self, parts: Sequence[Proposer]) -> None:
        self.parts = parts
        # Where rows are apart: gains by row and source, and the source of each row's last draft.
        self._gains: defaultdict[tuple[int, int], Gain] = defaultdict(Gain)
        self._served: dict[int, int] = {}

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        self._served = {}
        if rows.rows_apart:
            return self._apart(rows, budget, 0)
        for place, source in enumerate(self.parts):
            found = source.look_up(rows, budget)
            if found is None:
                found = source.propose(rows, budget)
                if found.length:
                    return found
                continue
            behind = [match for later in self.parts[place + 1 :] for match in later.matches]
            control, match = rows.controller, found.match_length
            if found.length and control.prefers(match, behind) and control.tries(match):
                return found
        return rows.no_draft()

    def _apart(self, rows: RowsView, budget: Budget, place: int) -> Draft:
        """Propose for each row the draft of the first source, from `place` on, that has one for it."""
        source, last = self.parts[place], place + 1 == len(self.parts)
        found = source.look_up(rows, budget)
        if found is None or last:
            found = source.propose(rows, budget)
        elif found.length:
            behind = range(place + 1, len(self.parts))
            lengths = tuple(
                length if self._gains[row, place].promises_more(self._gains[row, later] for later in behind) else 0
                for row, length in zip(rows.running, lengths_of(rows, found), strict=True)
            )
            found = replace(found, row_lengths=lengths) if any(lengths) else rows.no_draft()
        for row, length in zip(rows.running, lengths_of(rows, found), strict=True):
            if length:
                self._served.setdefault(row, place)
        return found if last else filled_up(rows, found, budget, lambda rest: self._apart(rows, rest, place + 1))

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        super().learn(rows, draft, target, verdict)
        for row, length in zip(rows.running, rows.row_lengths(draft), strict=True):
            if row in verdict.rows and row in self._served and length:
                place = self._served[row]
                # The cost of the row's draft, had the row run alone.
                steps = length if MODEL in self.parts[place].matches else 0
                self._gains[row, place].count(verdict.rows[row].run_length, rows.controller.price(steps, length))
        # These sources count for one round alone.
        self._served = {}


class Gain:
    """Measures the tokens that recent drafts of one source committed for their cost."""

    _TRIALS = 4
    _MEMORY = 0.9  # weight of a round relative to the next

    def __init__(self) -> None:
        self._tokens = self._cost = 0.0
        self.rounds = 0

    @property
    def rate(self) -> float:
        """Committed tokens per plain step in recent rounds; 1 before the first."""
        return self._tokens / self._cost if self._cost else 1.0

    @property
    def is_new(self) -> bool:
        """True if the rounds are too few to judge by."""
        return self.rounds < self._TRIALS

    def promises_more(self, behind: Iterable[Gain]) -> bool:
        """Return whether this source promises more than the sources behind it, or is still on trial."""
        return self.is_new or self.rate >= max([1.0, *(source.rate for source in behind)])

    def count(self, tokens: float, cost: float) -> None:
        """Count a round: the tokens that a row committed, and its cost in plain steps."""
        self._tokens = self._MEMORY * self._tokens + tokens
        self._cost = self._MEMORY * self._cost + cost
        self.rounds += 1
