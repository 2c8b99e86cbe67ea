"""Several drafters under one verifier: each drafts if the sources before it promise less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from selfspec.arguments import shown
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import Drafter, Proposer
from selfspec.draft.rows_view import RowsView
from selfspec.errors import DraftConfigError


@dataclass(frozen=True, init=False)
class Cascade(Drafter):
    """Takes the draft of the first of its `sources` that promises more than the sources behind it.

    The measure is the tokens that recent rounds with each match length committed for their cost. A source that runs a
    model is asked only if no earlier draft is taken; all learn from every round.
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

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
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
