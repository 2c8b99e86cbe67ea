"""A drafter's view of a generation, and drafts of chains of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, cast

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.cache.tree import Tree
from selfspec.device import to_device
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.prediction import Prediction
from selfspec.errors import UnsupportedOptionError
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.request import Draws, Races
from selfspec.runtime.runner import ModelRunner

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class DrawnToken:
    """Holds a drawn child of some nodes, `[rows, nodes]`, and its q, `[rows, nodes, vocab]`; None: greedy decoding."""

    token: Tensor
    q: Tensor | None


class DraftController(Protocol):
    """Answers a drafter's questions about costs and draft lengths; `most` is the largest budget of a round."""

    most: Budget

    def tries(self, match: int) -> bool:
        """Return whether a source with this match (0: the model) may draft now; ask once for each source in a round."""

    def prefers(self, match: int, behind: Sequence[int]) -> bool:
        """Return whether this look-up promises more than the sources behind it, by recent tokens for their cost."""

    def round_cost(self, steps: int, nodes: int) -> float:
        """Return a round's cost in plain steps, by its draft steps and draft tokens."""

    def shape(self, chances: tuple[float, ...], budget: Budget) -> Tree:
        """Choose the shape of the model's draft by siblings' acceptance rates at a place reached, likeliest first."""

    def look_up_length(self, share: float) -> int:
        """Return the most tokens worth looking up if this share of the pacing rows has a match; 0: none."""

    def predicted_length(self, share: float, longest: int) -> int:
        """Return the same for drafts of up to `longest` tokens out of predictions."""

    def goes_on(self, confidences: Callable[[], list[float]]) -> bool:
        """Return whether to draft another token, or another level of a tree, after the last token.

        `confidences` returns each row's largest probability there (at a level's first token), 0 without a distribution;
        it waits for the device. The last token is kept in any case: dropping it because of its score biases the output.
        """


class RowsView(Protocol):
    """Shows the rows of a generation before a round. A row keeps its number while it runs."""

    @property
    def size(self) -> int:
        """Number of rows, finished ones included."""

    @property
    def running(self) -> Sequence[int]:
        """Numbers of the rows that passes run, in the order of tensors."""

    @property
    def unfinished(self) -> AbstractSet[int]:
        """Numbers of the rows that have not ended; all of them run."""

    @property
    def pacing(self) -> AbstractSet[int]:
        """Numbers of the rows whose progress sets the pace of the batch."""

    @property
    def last_tokens(self) -> Tensor:
        """Last committed token of each running row, `[rows, 1]`."""

    @property
    def are_text(self) -> bool:
        """True if prompts are token ids alone, without embeddings or a past of other tokens."""

    def text(self, row: int, start: int = 0) -> list[int]:
        """Return a row's prompt and committed tokens, without padding, from token `start` on."""

    def source(self, row: int) -> list[int]:
        """Return the tokens that an encoder read for a row, if its vocabulary is the text's; else none."""

    def prediction(self, row: int) -> Prediction | None:
        """Return what the caller predicts of a row's new text."""

    def text_length(self, row: int) -> int:
        """Count a row's prompt and committed tokens."""

    def remaining(self, row: int) -> int:
        """Return the most tokens that a row may still commit."""

    @property
    def controller(self) -> DraftController:
        """Controller, which decides draft lengths."""

    @property
    def greedy(self) -> bool:
        """True if all rows take the likeliest token."""

    @property
    def chains_only(self) -> bool:
        """True if logits processors with memory judge drafts place by place, which takes chains."""

    @property
    def reads_prefixes(self) -> bool:
        """True if logits processors depend on the tokens before a place."""

    @property
    def in_lockstep(self) -> bool:
        """True if all rows commit only as many tokens of this round as the slowest row.

        Then a row's early draft tokens must not depend on another row's later ones, nor a level's shape on tokens below
        it.
        """

    def no_draft(self) -> Draft:
        """Return a draft without tokens."""

    @property
    def draft_slots(self) -> int:
        """Most nodes of a draft that the cache has slots for, which may be more than the budget has."""

    def open_block(self, tree: Tree) -> None:
        """Make room in the shared cache for a draft of this shape, before its first pass."""

    def draft_scores(self, logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        """Return the scores to draw draft tokens by, `[rows, places, vocab]`: logits after processors and warpers.

        `drafted` holds the draft tokens on the path to the last of these places, in pieces of `[rows, tokens]`.
        """

    def draw_draft(self, scores: Tensor, node: int, place: int) -> DrawnToken:
        """Draw a child of each of some nodes at one depth from their scores, `[rows, nodes, vocab]`.

        `node` is the first of these nodes, -1 for the last committed token; `place` counts this draft's earlier draws.
        """

    def draws(self, steps: int) -> Draws | Races | None:
        """Return the draws of a chain, if each takes the logits of its place alone; else None."""

    @property
    def runner(self) -> ModelRunner:
        """Runner of the model over the shared cache."""

    @property
    def programs(self) -> GraphCache | None:
        """Recorded passes of the wrapper; None: the stock modules run every pass."""

    @property
    def memories(self) -> dict[Hashable, object]:
        """Memories that drafters keep as long as the wrapper lives, by drafter."""


def remembered(rows: RowsView, key: Hashable, made: Callable[[], _Made]) -> _Made:
    """Return the value that the wrapper keeps under this key; make it at first use."""
    if key not in rows.memories:
        rows.memories[key] = made()
    return cast(_Made, rows.memories[key])


def made_once(rows: RowsView, drafter: Hashable, made: Callable[[PreTrainedModel], _Made]) -> _Made:
    """Return `made(model)`, made once for each drafter, device and dtype of the model."""
    model = rows.runner.model
    return remembered(rows, (drafter, model.device, model.dtype), partial(made, model))


def check_text(rows: RowsView, reader: str) -> None:
    """Refuse prompts of more than token ids, which `reader` alone reads."""
    if not rows.are_text:
        raise UnsupportedOptionError(
            f"{reader} reads token ids, and these prompts have embeddings, a soft prompt or a past of other tokens; "
            "pass the whole text as input_ids, or draft with the model's own layers"
        )


def chains(rows: RowsView, tokens: Sequence[Sequence[int]], match_length: int) -> Draft:
    """Make a draft with a chain of these tokens for each running row; no draft if all chains are empty."""
    longest = max(map(len, tokens))
    if not longest:
        return rows.no_draft()
    filled = [[*row, *[last] * (longest - len(row))] for row, last in zip(tokens, last_known(rows), strict=True)]
    return Draft.chain(guesses(rows, filled), match_length=match_length)


def guesses(rows: RowsView, tokens: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """Bring draft tokens from a text, `[rows, nodes]`, to the device, with ids beyond the head replaced."""
    return to_device(tokens, rows.last_tokens.device).clamp(max=rows.runner.vocabulary - 1)


def last_known(rows: RowsView) -> list[int]:
    """Return the last token of each running row's text, as filler; 0 without a text."""
    return [next(iter(rows.text(row, rows.text_length(row) - 1)), 0) for row in rows.running]
