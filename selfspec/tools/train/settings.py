"""What a training is asked to do. Each field is also an option of `selfspec train`, and its help describes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from selfspec.errors import TrainingError
from selfspec.values import check_numbers

Files = Annotated[
    list[Path],
    typer.Option(help='Text to learn from: JSONL with "text" or "messages" in each line, or plain; also .gz.'),
]
HeldOutBlocks = Annotated[int, typer.Option(min=1, help="Measure on at most N blocks.")]
Length = Annotated[int, typer.Option(min=8, help="Tokens of a block.")]
LearningRate = Annotated[
    float | None, typer.Option(help="Highest learning rate of AdamW; default: by the model's size.")
]
Decay = Annotated[float, typer.Option(help="Share of the steps, the last, over which the rate falls.")]

# The most parameters of a small model, its rate, and the fewest steps of warm-up.
_SMALL, _SMALL_RATE, _FEWEST_WARM_UP = 10_000_000, 5e-4, 10


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Text."""

    text: Files
    held_out: Annotated[Path | None, typer.Option(help="Text to measure on; default: a part of --text.")] = None
    held_out_blocks: HeldOutBlocks = 32


@dataclass(frozen=True, kw_only=True)
class Course:
    """Steps and learning rate.

    The rate rises linearly over `warmup` of the steps, stays, and falls linearly to 0 over the last `decay`.

    Raises:
        TrainingError: a value is out of range.
    """

    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 1000
    batch: Annotated[int, typer.Option(min=1, help="Blocks a step, on each device.")] = 8
    accumulate: Annotated[int, typer.Option(min=1, help="Batches summed up into one step.")] = 1
    length: Length = 256
    learning_rate: LearningRate = None
    warmup: Annotated[float, typer.Option(help="Share of the steps over which the rate rises.")] = 0.05
    decay: Decay = 0.4
    precision: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(metavar="DTYPE", help="Compute in `float32` or `bfloat16`; weights are float32."),
    ] = "float32"
    seed: Annotated[int, typer.Option(help="Seed of the order of the text, of dropout and of new weights.")] = 0
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between measurements.")] = 100

    def __post_init__(self) -> None:
        check_numbers(self, TrainingError)
        rate = 1.0 if self.learning_rate is None else self.learning_rate
        if not (rate > 0 and self.warmup >= 0 and self.decay >= 0 and self.warmup + self.decay <= 1):
            raise TrainingError(
                f"learning rate {self.learning_rate}, warm-up {self.warmup} and decay {self.decay} do not fit; the "
                "rate must be positive, and warm-up and decay shares of the steps"
            )

    def for_model(self, parameters: int) -> Course:
        """Return the course with a rate for a model of this many parameters, where none was given.

        A pretrained model is continued with the smaller steps the larger it is: 5e-4 for up to 10M parameters, then by
        the root of the size, so 1.4e-4 for 135M and 5e-5 for 1B.
        """
        usual = _SMALL_RATE * min(1.0, (_SMALL / parameters) ** 0.5)
        return replace(self, learning_rate=usual) if self.learning_rate is None else self

    @property
    def warm_up_steps(self) -> int:
        """Steps over which the rate rises: of short trainings a few at least, in which AdamW finds its scales."""
        return max(int(self.warmup * self.steps), min(_FEWEST_WARM_UP, self.steps // 4))


@dataclass(frozen=True, kw_only=True)
class HeadCourse(Course):
    """Steps and learning rate."""

    learning_rate: LearningRate = 2e-3
    decay: Decay = 0.8


@dataclass(frozen=True, kw_only=True)
class DraftHeadCourse(Course):
    """Steps and learning rate."""

    learning_rate: LearningRate = 1e-3
    decay: Decay = 0.8


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """Average.

    Raises:
        TrainingError: the share is out of range.
    """

    base_share: Annotated[float, typer.Option(help="Weight of the base, between 0 and 1.")] = 0.1
    held_out: Annotated[Path | None, typer.Option(help="Text to measure on, before and after; default: none.")] = None
    held_out_blocks: HeldOutBlocks = 32
    length: Length = 256

    def __post_init__(self) -> None:
        if not 0 < self.base_share < 1:
            raise TrainingError(f"the base's share lies between 0 and 1, e.g. 0.1; got {self.base_share}")
