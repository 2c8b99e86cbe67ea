"""Several drafters under one verifier: each drafts where those before it have nothing that promises more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import Drafter, Exit, Proposer
from selfspec.draft.rows_apart import filled_up
from selfspec.draft.rows_view import RowsView
from selfspec.draft.verdict import Verdict
from selfspec.errors import DraftConfigError


class JoinedDrafter(Drafter):
    """A drafter that is made of others.

    Attributes:
        sources: in the order in which they are asked.
    """

    def __init__(self, *sources: Drafter) -> None:
        wrong = [source for source in sources if not isinstance(source, Drafter)]
        twice = any(source in sources[:place] for place, source in enumerate(sources))
        if wrong or twice or len(sources) < 2:
            raise DraftConfigError(
                "a cascade and a union are of two or more different drafters, e.g. Cascade(PromptLookup(), "
                f"EarlyExit(layer=4)); got {list(sources)!r}"
            )
        if sum(source.runs != "nothing" for source in sources) > 1:
            raise DraftConfigError(
                f"a cascade and a union hold at most one drafter that runs a model, which drafts each time that it is "
                f"asked; got {list(sources)!r}"
            )
        bits = next((source.bits for source in sources if source.bits is not None), None)
        runs = next((source.runs for source in sources if source.runs != "nothing"), "nothing")
        for name, value in {"sources": sources, "bits": bits, "runs": runs}.items():
            object.__setattr__(self, name, value)

    def mapped(self, change: Callable[[Drafter], Drafter]) -> Drafter:
        return type(self)(*(source.mapped(change) for source in self.sources))


@dataclass(frozen=True, init=False)
class Cascade(JoinedDrafter):
    """Takes the draft of the first source that has one which promises more than the sources behind it.

    Which of them a round takes is the control's choice: by what rounds with drafts of each match length have lately
    committed for what they cost. A source that runs a model is asked only where none before it is taken. All of them
    learn from every round. Where rows are apart (see `FixedLength`) each row takes the first that has a draft for it.

    Attributes:
        sources: of any kind, in the order in which they are asked.
    """

    sources: tuple[Drafter, ...]

    def __init__(self, *sources: Drafter) -> None:
        """Take the sources, at least two. A cascade among them stands for its own sources.

        Raises:
            DraftConfigError: one of them is no drafter, there are fewer, one is there twice, or two run a model.
        """
        flat = (source.sources if isinstance(source, Cascade) else (source,) for source in sources)
        super().__init__(*(source for each in flat for source in each))

    @property
    def spelling(self) -> str | None:
        return joined_spelling(self.sources)

    def begin(self, rows: RowsView) -> CascadeProposer:
        return CascadeProposer([source.begin(rows) for source in self.sources])


class JoinedProposer(Proposer):
    """Asks others.

    Args:
        sources: in the order in which they are asked.
    """

    def __init__(self, sources: Sequence[Proposer]) -> None:
        self.sources = sources

    @property
    def early_exit(self) -> Exit | None:
        return next((source.early_exit for source in self.sources if source.early_exit is not None), None)

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.sources)

    def learn(self, rows: RowsView, draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        for source in self.sources:
            source.learn(rows, draft, logits, verdict)

    def join(self, other: JoinedProposer) -> None:
        for own, joined in zip(self.sources, other.sources, strict=True):
            own.join(joined)

    def select(self, rows: Sequence[int]) -> None:
        for source in self.sources:
            source.select(rows)


class CascadeProposer(JoinedProposer):
    """Proposes what one of the sources does."""

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        if rows.rows_apart:
            return self._apart(rows, budget, 0)
        for place, source in enumerate(self.sources):
            found = source.look_up(rows, budget)
            if found is None:
                found = source.propose(rows, budget)
                if found.length:
                    return found
                continue
            behind = [match for later in self.sources[place + 1 :] for match in later.matches]
            control, match = rows.controller, found.match_length
            if found.length and control.prefers(match, behind) and control.tries(match):
                return found
        return rows.no_draft()

    def _apart(self, rows: RowsView, budget: Budget, place: int) -> Draft:
        """Propose for each row what the first source has for it, from the source at `place` on."""
        source, last = self.sources[place], place + 1 == len(self.sources)
        found = source.look_up(rows, budget)
        if found is None or last:
            found = source.propose(rows, budget)
        return found if last else filled_up(rows, found, lambda: self._apart(rows, budget, place + 1))


def joined_spelling(sources: Sequence[Drafter]) -> str | None:
    """Return how drafters are written with a `+` between them; None: one has no name, or it means something else."""
    names = [source.spelling for source in sources]
    swallows = any(isinstance(source, JoinedDrafter) for source in sources[:-1])
    return None if None in names or swallows else "+".join(filter(None, names))
