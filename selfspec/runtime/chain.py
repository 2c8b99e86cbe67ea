"""Draft steps in one go: each draws a token, which the next one reads, and nothing goes back to the drafter between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen from logits, where that takes the last logits alone.

    Attributes:
        temperature: that logits are divided by; 0: the likeliest token is chosen.
        top_k: how many of the likeliest tokens are drawn from; 0: all.
        top_p: the share of their probability that is drawn from, of the likeliest first; 1: all.
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
        uniform: the numbers in [0, 1) that choose, float64, `[1 or 2, rows, steps]`; with two of them the first chooses
            a block of 256 tokens and the second one of these, see `selfspec.decode.noise.drawn_by_blocks`.
        vocabulary: how many token ids there are.
    """

    choice: Choice
    uniform: Tensor
    vocabulary: int

    @property
    def steps(self) -> int:
        """The most draft steps."""
        return self.uniform.shape[2]


@dataclass(frozen=True)
class ChainStep:
    """A draft step.

    Attributes:
        token: that it chose, `[rows, 1]`.
        confidences: the largest probability of each row where it was chosen, `[rows]`; 0 where there was none.
    """

    token: Tensor
    confidences: list[float]


@dataclass(frozen=True)
class Chain:
    """A chain that is being drafted.

    Attributes:
        probs: what tokens are drawn from, `[rows, steps, vocab]`, of the steps taken so far; None: nothing is drawn.
        steps: takes the next step whenever it is asked for one.
    """

    probs: Tensor | None
    steps: Iterator[ChainStep]
