"""Draft steps in one go: each step draws a token, which the next step reads, without returning to the drafter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen from the last logits alone.

    Attributes:
        temperature: divides the logits; 0: the likeliest token is chosen.
        top_k: number of likeliest tokens to draw from; 0: all.
        top_p: share of their probability to draw from, the likeliest tokens first; 1: all.
        suppressed: ids of tokens that are never chosen.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    suppressed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Draws:
    """The draws of a chain.

    Attributes:
        choice: how each token is chosen.
        uniform: numbers in [0, 1) that choose tokens, float64, `[1 or 2, rows, steps]`; of two the first chooses a
            block of 256 tokens and the second a token of the block, see `selfspec.decode.noise.drawn_by_blocks`.
        vocabulary: number of token ids.
    """

    choice: Choice
    uniform: Tensor
    vocabulary: int

    @property
    def steps(self) -> int:
        """Most draft steps."""
        return self.uniform.shape[2]


@dataclass(frozen=True)
class ChainStep:
    """A draft step.

    Attributes:
        token: the chosen token, `[rows, 1]`.
        confidences: the largest probability of each row at this step, `[rows]`; 0 where there was none.
    """

    token: Tensor
    confidences: list[float]


@dataclass(frozen=True)
class Chain:
    """A chain that is being drafted.

    Attributes:
        probs: the distributions that tokens are drawn from, `[rows, steps, vocab]`, filled for the steps taken so far;
            None: nothing is drawn.
        steps: takes one step per iteration.
    """

    probs: Tensor | None
    steps: Iterator[ChainStep]
