"""How exits are taught: the LayerSkip recipe in formulas (Elhoushi et al., 2024, arXiv 2404.16710), and exit heads."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from selfspec.errors import TrainingError
from selfspec.values import check_numbers

_KINDS = ("eagle3", "medusa", "mtp", "uno")
_NUMBERS = re.compile(r"\d{1,18}(,\d{1,18})*", re.ASCII)


def parse_exits(text: str) -> tuple[int, ...]:
    """Exit layers from `2,3,4`; none from an empty text."""
    given = text.replace(" ", "") if text else ""
    if not given:
        return ()
    if not _NUMBERS.fullmatch(given):
        raise TrainingError(f"--exits {text!r} is not understood; write exit layers with commas between, e.g. 2,3,4")
    return tuple(int(number) for number in given.split(","))


Exits = Annotated[
    tuple[int, ...],
    typer.Option(parser=parse_exits, metavar="LAYERS", help="Exit layers to train, e.g. 2,3,4.", show_default=False),
]


@dataclass(frozen=True, kw_only=True)
class BesideRecipe:
    """How what drafts for a base that stays as it is learns from it.

    Raises:
        TrainingError: a value is out of range.
    """

    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Draft only the N most frequent tokens of the text.")
    ] = None
    own_texts: Annotated[
        int, typer.Option(min=0, help="Learn from N texts that the model continues from beginnings.")
    ] = 0
    beginning: Annotated[int, typer.Option(min=1, help="Tokens of each beginning.")] = 16
    temperature: Annotated[float, typer.Option(help="At which it writes these texts; 0: greedily.")] = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, TrainingError)
        if self.temperature < 0:
            raise TrainingError(f"a temperature is 0 or more; got {self.temperature}")


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(BesideRecipe):
    """Head."""

    kind: Annotated[str, typer.Option(metavar="|".join(_KINDS), help="What is trained: see docs/heads.md.")]
    depth: Annotated[int, typer.Option(min=1, max=16, help="Tokens that it learns to draft in a row.")] = 5
    rank: Annotated[int, typer.Option(min=1, help="Of the LoRA, for the kind uno.")] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in _KINDS:
            raise TrainingError(f"there is no kind {self.kind!r} of heads to train; choose one of {', '.join(_KINDS)}")
        if self.kind != "eagle3" and self.vocabulary is not None:
            raise TrainingError(
                f"heads of the kind {self.kind} are published with whole vocabularies; drop --vocabulary"
            )


@dataclass(frozen=True, kw_only=True)
class ExitHeadRecipe(BesideRecipe):
    """Heads."""

    exits: Exits = ()
    rank: Annotated[int | None, typer.Option(min=1, help="Width of each head's MLP; default: twice the model's.")] = (
        None
    )
    loss: Annotated[
        Literal["kl", "tv", "both"],
        typer.Option(help="`kl`: divergence from the full model; `tv`: total variation, 1 - alpha; `both`: sum."),
    ] = "both"
    foldable: Annotated[
        bool,
        typer.Option(
            "--foldable", help="Leave the residual stream as it is: `selfspec export` makes such a head a layer."
        ),
    ] = False

    def exits_of(self, depth: int) -> tuple[int, ...]:
        """The exits taught in a network of `depth` layers; by default at a quarter and a third of it."""
        return _checked(self.exits, depth) or tuple(sorted({max(1, depth // 4), max(1, depth // 3)}))


@dataclass(frozen=True, kw_only=True)
class LayerSkipRecipe:
    """Recipe.

    An exit at E leaves after layers [0, E), the paper's layer E - 1. No exits: all of 1..N-1.
    """

    exits: Exits = ()
    dropout: Annotated[float, typer.Option(help="Chance that a sample skips the last layer.")] = 0.1
    dropout_curriculum: Annotated[
        Literal["constant", "exponential"],
        typer.Option(help="`constant`, or `exponential`: the chance rises from 0 over the training."),
    ] = "constant"
    curriculum: Annotated[
        Literal["rotational", "gradual", "all"],
        typer.Option(
            help="Exits that take part: `rotational`, every R-th in turn; `gradual`, ever earlier ones; or `all`."
        ),
    ] = "rotational"
    rotation: Annotated[int, typer.Option(min=1, metavar="R", help="R of the rotational curriculum.")] = 4
    exit_scale: Annotated[float, typer.Option(help="Weight of the exits against the full model.")] = 0.2
    weighting: Annotated[
        Literal["depth", "even"], typer.Option(help="Exits weigh more with `depth`, or all `even`.")
    ] = "depth"
    exit_target: Annotated[
        Literal["text", "model"],
        typer.Option(help="Exits learn the next token of the `text`, or the distribution of the full `model`."),
    ] = "text"

    def exits_of(self, depth: int) -> tuple[int, ...]:
        """The exits taught in a network of `depth` layers, first to last."""
        exits = _checked(self.exits, depth)
        if not 0 <= self.dropout < 1:
            raise TrainingError(f"layer dropout {self.dropout} is no chance in 0..1 (1 excluded)")
        if self.rotation < 1 or not 0 <= self.exit_scale < math.inf:
            raise TrainingError(f"rotation {self.rotation} or exit scale {self.exit_scale} is out of range")
        return tuple(sorted(exits)) or tuple(range(1, depth))

    def dropout_rates(self, depth: int, step: int, steps: int) -> list[float]:
        """Chance that a sample skips each layer in a step: p_l = S(t) (exp(l ln 2 / (N - 1)) - 1) p_max.

        Args:
            depth: N, layers of the network.
            step: t, from 0.
            steps: T of the whole training.
        """
        scale = 1.0 if self.dropout_curriculum == "constant" else _rising(step, steps)
        return [scale * _rising(layer, depth) * self.dropout for layer in range(depth)]

    def active(self, depth: int, step: int, steps: int) -> list[int]:
        """The exits that take part in a step. The full model always does."""
        exits = self.exits_of(depth)
        match self.curriculum:
            case "rotational":
                return [exit_layer for place, exit_layer in enumerate(exits) if (place - step) % self.rotation == 0]
            case "gradual":
                # One exit more, from the last to the first, every T / 2n steps: all of n are there at half time.
                joined = min(len(exits), 1 + 2 * len(exits) * step // steps)
                return list(exits[len(exits) - joined :])
            case "all":
                return list(exits)

    def weights(self, depth: int, active: list[int]) -> list[float]:
        """Share of the loss of each active exit and, last, of the full model. They sum to 1."""
        if self.weighting == "depth":
            raw = [self.exit_scale * _sum_below(exit_layer) for exit_layer in active]
            raw.append(depth - 1 + self.exit_scale * _sum_below(depth - 1))
        else:
            raw = [self.exit_scale for _ in active] + [1.0]
        return [weight / sum(raw) for weight in raw]


def _checked(exits: Sequence[Any], depth: int) -> tuple[int, ...]:
    """Exits that a network of `depth` layers has, each once."""
    for exit_layer in exits:
        if type(exit_layer) is not int or not 1 <= exit_layer < depth:
            raise TrainingError(
                f"exit {exit_layer!r} is out of range: this model has {depth} layers, choose 1..{depth - 1}"
            )
    return tuple(dict.fromkeys(exits))


def _rising(place: int, places: int) -> float:
    """From 0 at the first place to 1 at the last, exponentially."""
    return math.expm1(place * math.log(2) / (places - 1)) if places > 1 else 0.0


def _sum_below(count: int) -> int:
    """0 + 1 + ... + (count - 1): the paper's weight of layer count - 1."""
    return count * (count - 1) // 2
