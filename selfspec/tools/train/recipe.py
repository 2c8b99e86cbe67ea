"""Settings of trainings: texts, steps, and how exits (Elhoushi et al., 2024, arXiv 2404.16710) and heads learn."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from typer import Option

from selfspec.errors import TrainingError
from selfspec.measure.settings import check_numbers

Files = Annotated[
    list[Path],
    Option(help='Text to learn from: JSONL with "text" or "messages" in each line, or plain; also .gz.'),
]

# The most parameters of a small model, its rate, and the fewest steps of warm-up.
_SMALL, _SMALL_RATE, _FEWEST_WARM_UP = 10_000_000, 5e-4, 10


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Text."""

    text: Files
    held_out: Annotated[Path | None, Option(help="Text to measure on; default: a part of --text.")] = None
    held_out_blocks: Annotated[int, Option(min=1, help="Measure on at most N blocks.")] = 32


@dataclass(frozen=True, kw_only=True)
class Course:
    """Steps and learning rate.

    The rate rises linearly over `warmup` of the steps, stays, and falls linearly to 0 over the last `decay`.

    Raises:
        TrainingError: a value is out of range.
    """

    steps: Annotated[int, Option(min=1, help="Optimiser steps.")] = 1000
    batch: Annotated[int, Option(min=1, help="Blocks a step, on each device.")] = 8
    accumulate: Annotated[int, Option(min=1, help="Batches summed up into one step.")] = 1
    length: Annotated[int, Option(min=8, help="Tokens of a block.")] = 256
    learning_rate: Annotated[float | None, Option(help="Highest learning rate of AdamW; default: by what learns.")] = (
        None
    )
    warmup: Annotated[float, Option(help="Share of the steps over which the rate rises.")] = 0.05
    decay: Annotated[float, Option(help="Share of the steps, the last, over which the rate falls.")] = 0.8
    precision: Annotated[
        Literal["float32", "bfloat16"],
        Option(metavar="DTYPE", help="Compute in `float32` or `bfloat16`; weights are float32."),
    ] = "float32"
    seed: Annotated[int, Option(help="Seed of the order of the text, of dropout and of new weights.")] = 0
    save_every: Annotated[int, Option(min=1, help="Steps between checkpoints.")] = 100
    evaluate_every: Annotated[int, Option(min=1, help="Steps between measurements.")] = 100
    report_to: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Tracker, as transformers calls it: `tensorboard`, `wandb`, ...; repeatable."),
    ] = None

    def __post_init__(self) -> None:
        check_numbers(self, TrainingError)
        rate = 1.0 if self.learning_rate is None else self.learning_rate
        if not (rate > 0 and self.warmup >= 0 and self.decay >= 0 and self.warmup + self.decay <= 1):
            raise TrainingError(
                f"learning rate {self.learning_rate}, warm-up {self.warmup} and decay {self.decay} do not fit; the "
                "rate must be positive, and warm-up and decay shares of the steps"
            )

    @property
    def warm_up_steps(self) -> int:
        """Steps over which the rate rises: of short trainings a few at least, in which AdamW finds its scales."""
        return max(int(self.warmup * self.steps), min(_FEWEST_WARM_UP, self.steps // 4))


_NUMBERS = re.compile(r"\d{1,18}(,\d{1,18})*", re.ASCII)


def parse_exits(text: str) -> tuple[int, ...]:
    """Parse exit layers from `2,3,4`; none from an empty text."""
    given = text.replace(" ", "") if text else ""
    if not given:
        return ()
    if not _NUMBERS.fullmatch(given):
        raise TrainingError(f"--exits {text!r} is not understood; write exit layers with commas between, e.g. 2,3,4")
    return tuple(int(number) for number in given.split(","))


Exits = Annotated[
    tuple[int, ...],
    Option(parser=parse_exits, show_default=False, metavar="LAYERS", help="Exit layers to train, e.g. 2,3,4."),
]


@dataclass(frozen=True, kw_only=True)
class BesideRecipe:
    """Settings of drafts for a base that stays as it is; a TrainingError: a value is out of range."""

    vocabulary: Annotated[int | None, Option(min=1, help="Draft only the N most frequent tokens of the text.")] = None
    own_texts: Annotated[int, Option(min=0, help="Learn from N texts that the model continues from beginnings.")] = 0
    beginning: Annotated[int, Option(min=1, help="Tokens of each beginning.")] = 16
    temperature: Annotated[float, Option(help="At which it writes these texts; 0: greedily.")] = 1.0
    usual_rate: ClassVar[float]

    def __post_init__(self) -> None:
        check_numbers(self, TrainingError)
        if self.temperature < 0:
            raise TrainingError(f"a temperature is 0 or more; got {self.temperature}")


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(BesideRecipe):
    """Head."""

    depth: Annotated[int, Option(min=1, max=16, help="Tokens that it learns to draft in a row.")] = 5
    usual_rate = 1e-3


@dataclass(frozen=True, kw_only=True)
class ExitHeadRecipe(BesideRecipe):
    """Heads."""

    exits: Exits = ()
    rank: Annotated[int | None, Option(min=1, help="Width of each head's MLP; default: twice the model's.")] = None
    usual_rate = 2e-3

    def exits_of(self, depth: int) -> tuple[int, ...]:
        """Return the exits to teach in a network of `depth` layers; by default at a quarter and a third of it."""
        return _checked(self.exits, depth) or tuple(sorted({max(1, depth // 4), max(1, depth // 3)}))


@dataclass(frozen=True, kw_only=True)
class LayerSkipRecipe:
    """Recipe.

    An exit at E leaves after layers [0, E), the paper's layer E - 1. No exits: all of 1..N-1.
    """

    exits: Exits = ()
    dropout: Annotated[float, Option(help="Chance that a sample skips the last layer.")] = 0.1
    curriculum: Annotated[
        Literal["rotational", "gradual"],
        Option(help="Exits that take part: `rotational`, every R-th in turn, or `gradual`, ever earlier ones."),
    ] = "rotational"
    rotation: Annotated[int, Option(min=1, metavar="R", help="R of the rotational curriculum; 1: all.")] = 4
    exit_scale: Annotated[float, Option(help="Weight of the exits against the full model.")] = 0.2
    weighting: Annotated[Literal["depth", "even"], Option(help="Exits weigh more with `depth`, or all `even`.")] = (
        "depth"
    )
    exit_target: Annotated[
        Literal["text", "model"],
        Option(help="Exits learn the next token of the `text`, or the distribution of the full `model`."),
    ] = "text"

    def exits_of(self, depth: int) -> tuple[int, ...]:
        """Return the exits to teach in a network of `depth` layers, first to last."""
        exits = _checked(self.exits, depth)
        if not 0 <= self.dropout < 1:
            raise TrainingError(f"layer dropout {self.dropout} is no chance in 0..1 (1 excluded)")
        if self.rotation < 1 or not 0 <= self.exit_scale < math.inf:
            raise TrainingError(f"rotation {self.rotation} or exit scale {self.exit_scale} is out of range")
        return tuple(sorted(exits)) or tuple(range(1, depth))

    def dropout_rates(self, depth: int) -> list[float]:
        """Return the chance to skip each layer: p_l = (exp(l ln 2 / (N - 1)) - 1) p_max."""
        rise = math.log(2) / max(depth - 1, 1)
        return [math.expm1(layer * rise) * self.dropout for layer in range(depth)]

    def active(self, depth: int, step: int, steps: int) -> list[int]:
        """Return the exits that take part in a step. The full model always does."""
        exits = self.exits_of(depth)
        if self.curriculum == "rotational":
            return [exit_layer for place, exit_layer in enumerate(exits) if (place - step) % self.rotation == 0]
        # One exit more, from the last to the first, every T / 2n steps: all of n are there at half time.
        joined = min(len(exits), 1 + 2 * len(exits) * step // steps)
        return list(exits[len(exits) - joined :])

    def weights(self, depth: int, active: list[int]) -> list[float]:
        """Return the share of the loss of each active exit and, last, of the full model. They sum to 1."""
        if self.weighting == "depth":
            raw = [self.exit_scale * _sum_below(exit_layer) for exit_layer in active]
            raw.append(depth - 1 + self.exit_scale * _sum_below(depth - 1))
        else:
            raw = [self.exit_scale for _ in active] + [1.0]
        return [weight / sum(raw) for weight in raw]


def rate_of_model(parameters: int) -> float:
    """Return the learning rate of a pretrained model that is continued: the larger it is, the smaller the steps.

    It is 5e-4 for up to 10M parameters, then by the root of the size, so 1.4e-4 for 135M and 5e-5 for 1B.
    """
    return _SMALL_RATE * min(1.0, math.sqrt(_SMALL / parameters))


def _checked(exits: Sequence[Any], depth: int) -> tuple[int, ...]:
    """Return the distinct exits; refuse those that a network of `depth` layers does not have."""
    for exit_layer in exits:
        if type(exit_layer) is not int or not 1 <= exit_layer < depth:
            raise TrainingError(
                f"exit {exit_layer!r} is out of range: this model has {depth} layers, choose 1..{depth - 1}"
            )
    return tuple(dict.fromkeys(exits))


def _sum_below(count: int) -> int:
    """Return 0 + 1 + ... + (count - 1): the paper's weight of layer count - 1."""
    return count * (count - 1) // 2
