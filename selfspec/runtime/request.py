"""Describe what is asked of one pass, or of a chain of draft steps, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.model.early_head import DraftHead
from selfspec.model.gated_view import ExactStates, Features, Point
from selfspec.model.layer_path import LayerPath


@dataclass(frozen=True, eq=False)
class PassRequest:
    """Asks for one pass over nodes of the open block."""

    path: LayerPath  # the sublayers that run, their weights, and what its tokens attend to, `path.window`
    tokens: Tensor  # tokens of consecutive nodes, `[batch, tokens]`, or embeddings, `[batch, tokens, hidden]`
    entering: ExactStates | None = None  # what enters at `path.start`
    head: DraftHead | None = None  # reads the last states of an early exit; None: the model's own norm and head
    first: int = -1  # the first of the nodes; -1: the last committed token
    taps: tuple[Point, ...] = ()  # points on the path whose states are kept
    tree: Tree | None = None  # the nodes of the block, which is opened for them; None: it is open
    headless: bool = False  # True if it leaves keys, values and states, and no logits

    @property
    def width(self) -> int:
        """Tokens of each row."""
        return self.tokens.shape[1]

    @property
    def runs(self) -> Runs:
        """The part that decides which view of the model runs."""
        return Runs(self.path, self.head, self.taps)


@dataclass(frozen=True)
class Runs:
    """Names a view of the model; attributes are as in `PassRequest`."""

    path: LayerPath
    head: DraftHead | None = None
    taps: tuple[Point, ...] = ()


NO_LOGITS = torch.empty(0, 0, 0)
"""Logits of a pass that ends before the head."""


@dataclass(frozen=True)
class PassResult:
    """Holds the result of one pass.

    Attributes:
        logits: `[batch, tokens, vocab]`, or `NO_LOGITS`.
        states: what it left at `path.resume_point`; None where the path leaves nothing.
        written: what a recorded pass leaves for slots on the host, as `SharedCache.write` takes it.
    """

    logits: Tensor
    states: ExactStates | None = None
    features: Features = field(default_factory=dict)
    written: tuple[Tensor, ...] = ()

    def flat(self) -> tuple[Tensor, ...]:
        """Return the tensors of a result: logits if there are any, states, features."""
        logits = () if self.logits is NO_LOGITS else (self.logits,)
        states = () if self.states is None else (self.states.hidden, *self.states.attention.values())
        return (*logits, *states, *self.features.values())

    def first(self, width: int) -> PassResult:
        """Return the result of the first `width` tokens of each row."""
        logits = self.logits if self.logits is NO_LOGITS else self.logits[:, :width]
        states = None if self.states is None else self.states.first(width)
        features = {point: each[..., :width, :] for point, each in self.features.items()}
        return PassResult(logits, states, features, written=self.written)


@dataclass(frozen=True)
class Choice:
    """Says how tokens are chosen from the last logits alone."""

    temperature: float  # divides the logits; 0: the likeliest token is chosen
    top_k: int = 0  # number of likeliest tokens to draw from; 0: all
    top_p: float = 1.0  # share of their probability to draw from, the likeliest tokens first; 1: all
    suppressed: tuple[int, ...] = ()  # ids of tokens that are never chosen


@dataclass(frozen=True)
class Draws:
    """Holds the draws of a chain over `vocabulary` token ids.

    `uniform` are numbers in [0, 1) that choose tokens, float64, `[1 or 2, rows, steps]`; of two the first chooses a
    block of 256 tokens and the second a token of the block, see `selfspec.decode.noise.drawn_by_blocks`.
    """

    choice: Choice
    uniform: Tensor
    vocabulary: int

    @property
    def steps(self) -> int:
        """Most draft steps."""
        return self.uniform.shape[2]


@dataclass(frozen=True)
class Drawn:
    """Holds a drawn token of each row, `[rows, 1]`.

    `q`, `[rows, 1, vocab]`, is what it was drawn from, None: nothing was drawn; `confidences`, `[rows]`, are each row's
    largest probability, 0 where there was none.
    """

    token: Tensor
    q: Tensor | None
    confidences: Tensor


@dataclass(frozen=True)
class Races:
    """Holds the draws of a chain on a device, where an exponential race draws tokens.

    `drawn` is a function of logits, `[rows, 1, vocab]`, and of lots, the same for an equal `choice`. `race` fills lots,
    `[rows, 1, vocabulary]`, with those of a step; None: nothing is drawn. `steps` are the most draft steps; `leaves`
    names the attentions whose outputs a step leaves beside its states, None: it leaves none of both.
    """

    choice: Choice
    drawn: Callable[[Tensor, Sequence[Tensor]], Drawn]
    race: Callable[[int, Tensor], Tensor] | None
    steps: int
    vocabulary: int
    leaves: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ChainStep:
    """Holds a draft step: the chosen token, `[rows, 1]`, and each row's largest probability; 0 where there was none.

    `states` are as in `PassResult`.
    """

    token: Tensor
    confidences: list[float] | Tensor
    states: ExactStates | None = None


@dataclass(frozen=True)
class Chain:
    """Holds a chain that is being drafted, one step per iteration; `probs` are its draft q, `[rows, steps, vocab]`.

    Its steps are to be closed: they may keep others from the memory that they use.
    """

    probs: Tensor | None
    steps: Generator[ChainStep, None, None]
