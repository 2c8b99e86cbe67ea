"""What a drafter is: it turns the state of a generation into a Draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from selfspec.gate import ExactStates
from selfspec.path import Path, Sublayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfspec.adapter import Adapter
    from selfspec.draft.draft_head import DraftHead
    from selfspec.state import State


@dataclass(frozen=True)
class Resume:
    """What of a draft's work the target need not do again.

    The shared cache holds exact keys and values of all sublayers before `start`, for every token the draft ran.

    Attributes:
        start: the first sublayer whose work is not exact; verification goes on there.
        states: what enters it, for each token the draft ran, `[batch, drafted, hidden]`: the last committed token and
            all draft tokens but the last, which no draft step has read.
    """

    start: Sublayer
    states: ExactStates


@dataclass(frozen=True)
class ExitPath:
    """A draft that leaves the network early: all it computes is what the target computes first.

    Attributes:
        path: what a draft step runs.
        start: where the target goes on.
        head: what reads the path's last states; None: the model's own norm and head.
    """

    path: Path
    start: Sublayer
    head: DraftHead | None


@dataclass(frozen=True)
class Draft:
    """Tokens proposed for the target to judge.

    Attributes:
        tokens: `[batch, drafted]`.
        q: the distribution each token was drawn from, `[batch, drafted, vocab]`; None where the draft is
            deterministic (q is one-hot at its tokens), as greedy drafts and look-ups are.
        resume: what verification may build on; None where it starts from tokens.
        steps: draft steps it took.
        match: of a look-up, how many tokens back from its end the text is alike where the draft was found; else 0.
    """

    tokens: Tensor
    q: Tensor | None = None
    resume: Resume | None = None
    steps: int = 0
    match: int = 0

    @property
    def length(self) -> int:
        """Draft length: tokens drafted for each row."""
        return self.tokens.shape[1]


class Drafter(ABC):
    """Proposes tokens. A drafter is configuration only: it holds nothing of a model or of a generation."""

    @abstractmethod
    def check(self, depth: int) -> None:
        """Refuse a network of `depth` layers that this drafter does not fit.

        Raises:
            DraftConfigError: naming what is out of range.
        """

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:  # noqa: B027 - some fit every model
        """Refuse a model that this drafter was not made for. Asked once, when the model is wrapped.

        Raises:
            SelfSpecError: naming what does not fit.
        """

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        """The draft cost ratio c, estimated: a draft step's cost in steps of plain decoding. 0: it runs no model."""
        return 0.0

    def exit_path(self, depth: int) -> ExitPath | None:
        """How the drafter leaves a network of `depth` layers early; None: it does not."""
        return None

    @abstractmethod
    def draft(self, state: State, length: int) -> Draft:
        """Propose up to `length` >= 1 tokens for each row, as many for each; fewer or none if `state.control` says so.

        Leaves the cursors of the cache where they were.
        """
