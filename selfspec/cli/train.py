"""`selfspec train`: teach a model to exit early, or train what exits early for it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from selfspec.cli.options import Model, Output, OutputFormat, Threads, WholeMachine, grouped, prepare_process
from selfspec.cli.terminal import console, counting_bar, figures_table, progress_bar
from selfspec.errors import UnsupportedOptionError
from selfspec.measure.embedded import model_place
from selfspec.tools.train.recipe import ExitHeadRecipe, LayerSkipRecipe
from selfspec.tools.train.settings import Averaging, Course, Files, HeadCourse, Texts

if TYPE_CHECKING:
    from selfspec.measure.estimate import Estimate

train = typer.Typer(
    name="train",
    help="Train drafts that the full model accepts. Repeat an interrupted command to resume it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

# Of the Trainer's log: what the bar and the report say.
_UNSAID = {
    "epoch",
    "total_flos",
    "train_loss",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
}
# Of the check of a trained checkpoint: tokens of a prompt, and what is generated.
_CONTEXT, _NEW, _TEMPERATURE = 24, 32, 0.8

To = Annotated[Path, typer.Option(metavar="FOLDER", help="Where the result goes. Repeat the command to resume there.")]


@dataclass(frozen=True)
class CheckedExit:
    """An exit of a trained checkpoint, in times plain decoding.

    Attributes:
        draft: its name.
        predicted: from its acceptance rate on held-out text and the weights that it reads.
        greedy: measured, greedily.
        sampled: measured, at temperature 0.8.
    """

    draft: str
    predicted: float
    greedy: Estimate
    sampled: Estimate


@dataclass(frozen=True, kw_only=True)
class Trained:
    """`selfspec train layerskip`, `plain` and `exit`.

    Attributes:
        base: fingerprint of the weights it began with.
        before: figures on held-out text.
        checked: of `train layerskip`: each exit, predicted and measured in times plain decoding.
    """

    source: dict[str, Any]
    base: str
    course: dict[str, Any]
    recipe: dict[str, Any] | None
    before: dict[str, float]
    after: dict[str, float]
    seconds_of_last_stretch: float
    log: list[dict[str, float]]
    folder: str
    checked: list[CheckedExit] | None = None


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """`selfspec train average`."""

    trained: dict[str, str]
    base: dict[str, str]
    base_share: float
    held_out: str | None
    held_out_blocks: int
    before: dict[str, float]
    after: dict[str, float]
    folder: str


_Result = TypeVar("_Result", Trained, Averaged)


@dataclass(frozen=True)
class Counted:
    """`selfspec train vocabulary`.

    Attributes:
        coverage: share of the text's tokens that are kept.
    """

    file: str
    size: int
    coverage: float

    def __str__(self) -> str:
        return f"{self.file}: {self.size} tokens, {self.coverage:.2%} of the text"


@train.command()
@grouped
def layerskip(
    model: Model,
    to: To,
    text: Texts,
    recipe: LayerSkipRecipe,
    course: Course,
    machine: WholeMachine,
    check_seconds: Annotated[
        float,
        typer.Option(
            min=0, help="After the training, measure the exits for about X seconds; each decodes one text at least."
        ),
    ] = 15.0,
    output: Output = "text",
) -> Trained:
    """Continue a checkpoint by the LayerSkip recipe (Elhoushi et al., 2024), so that early exits draft well.

    The weights change; the report says what that costs the full model on held-out text.
    """
    if not check_seconds < math.inf:
        raise UnsupportedOptionError(f"--check-seconds {check_seconds:g} never ends; give e.g. 15")
    trained = _train(model, text, course, recipe, to, machine)
    checked = _check_exits(to, machine.device, trained.after, check_seconds)
    _shown(trained, output)
    if output == "text":
        print(verdict(checked, to))
    return replace(trained, checked=checked)


@train.command()
@grouped
def plain(model: Model, to: To, text: Texts, course: Course, machine: WholeMachine, output: Output = "text") -> Trained:
    """Continue a checkpoint on text as `train layerskip` does, but without its recipe: what to compare that with."""
    return _shown(_train(model, text, course, None, to, machine), output)


@train.command("exit")
@grouped
def exit_heads(
    model: Model,
    to: To,
    text: Texts,
    heads: ExitHeadRecipe,
    course: HeadCourse,
    machine: WholeMachine,
    output: Output = "text",
) -> Trained:
    """Train exit heads for a base that stays as it is: a side-car of a few MB, for `--draft head:FOLDER`.

    Heads learn the full model's own distribution; alpha = 1 - TV is the acceptance rate to expect.
    """
    return _shown(_train(model, text, course, heads, to, machine), output)


@train.command()
@grouped
def average(
    trained: Annotated[str, typer.Argument(metavar="TRAINED", help="What `train layerskip` made.")],
    base: Annotated[str, typer.Argument(metavar="BASE", help="The checkpoint it was made from.")],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the new checkpoint goes.")],
    averaging: Averaging,
    threads: Threads = None,
    output: Output = "text",
) -> Averaged:
    """Average a trained checkpoint with its base: a little less of what was taught, for a better full model."""
    from selfspec.tools.train.average import average as run

    _prepare(threads)
    with progress_bar("averaging") as bar:
        bar.add_task("reading, averaging, measuring", total=None)
        report = run(model_place(trained), model_place(base), averaging, to)
    return _shown(Averaged(**report, folder=str(to)), output)


@train.command()
@grouped
def vocabulary(
    model: Model,
    text: Files,
    to: Annotated[Path, typer.Option(help="The JSON file to write.")],
    size: Annotated[int, typer.Option(min=1, help="Tokens to keep.")],
) -> Counted:
    """Count which tokens a draft needs, for `--draft exit:4+vocab:FILE`: its steps then read only their rows."""
    from selfspec.tools.train.vocabulary import count_vocabulary

    _prepare(threads=None)
    return Counted(str(to), size, count_vocabulary(model_place(model), text, size, to))


def _train(
    model: str,
    text: Texts,
    course: Course,
    recipe: LayerSkipRecipe | ExitHeadRecipe | None,
    to: Path,
    machine: WholeMachine,
) -> Trained:
    """Train, and return the figures before and after."""
    from selfspec.tools.train.run import run

    _prepare(machine.threads)
    printed: set[str] = set()
    with counting_bar("training") as count:

        def observe(step: int, steps: int, figures: Mapping[str, float]) -> None:
            count(step, steps)
            said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if name not in _UNSAID)
            # What is measured in the last step is measured again at the end.
            if said and said not in printed:
                printed.add(said)
                # Where there is a bar, above it.
                print(f"step {step}/{steps}: {said}", file=sys.stderr, flush=True)

        report = run(model_place(model), text, course, recipe, to, observe, machine.device)
    return Trained(**report, folder=str(to))


def _prepare(threads: int | None) -> None:
    import torch
    from transformers.utils import logging

    prepare_process(threads)
    logging.disable_progress_bar()
    # Subnormal numbers are many times slower than others on some processors.
    torch.set_flush_denormal(True)


def _shown(result: _Result, output: OutputFormat) -> _Result:
    """Print what a training did to the figures on the held-out text, unless JSON is to say it."""
    if output == "json":
        return result
    before = {name: f"{figure:.3f}" for name, figure in result.before.items()}
    rows = [(name, before.get(name, ""), f"{after:.3f}") for name, after in result.after.items()]
    title = f"On held-out text; the result is in {result.folder}"
    console().print(figures_table(title, ["figure"], ["before", "after"], rows))
    return result


def _check_exits(folder: Path, device: str, figures: Mapping[str, float], seconds: float) -> list[CheckedExit]:
    """Decode with each exit that has figures, in turns with plain decoding, for some seconds."""
    from selfspec.measure.prompts import BEGINNINGS
    from selfspec.model.checkpoint import load_checkpoint
    from selfspec.tools.lab.arms import ArmSpec, make_arm
    from selfspec.tools.lab.cell import Cell
    from selfspec.tools.lab.turns import race, scores

    layers = [int(name.removeprefix("speedup_")) for name in figures if name.startswith("speedup_")]
    checkpoint = load_checkpoint(str(folder), "auto", device)
    prompts = [checkpoint.encode(text)[:, :_CONTEXT] for text in BEGINNINGS]
    specs = [ArmSpec("plain"), *(ArmSpec("draft", f"exit:{layer}") for layer in layers)]
    arms = [make_arm(spec, checkpoint.model) for spec in specs]
    greedy, sampled = (Cell("check", temperature, 1, _CONTEXT, _NEW) for temperature in (0.0, _TEMPERATURE))
    turns = race(arms, (greedy, sampled), prompts, time.perf_counter() + seconds, lambda: None)
    measured = zip(scores(turns, greedy)[1:], scores(turns, sampled)[1:], strict=True)
    return [
        CheckedExit(f"exit:{layer}", figures[f"speedup_{layer}"], first.speedup, second.speedup)
        for layer, (first, second) in zip(layers, measured, strict=True)
    ]


def verdict(checked: Sequence[CheckedExit], folder: Path) -> str:
    """Say what to do with the checkpoint."""
    best = max(checked, key=lambda each: each.sampled.value)
    said = f"greedy {best.greedy.shown(2)}, sampled {best.sampled.shown(2)}, predicted {best.predicted:.2f}"
    if max(best.greedy.value, best.sampled.value) <= 1:
        return (
            f"No exit beat plain decoding here; the best is {best.draft}: {said}. Train for longer or on more text, or "
            f"draft without training: --draft lookup+int8"
        )
    return (
        f"{best.draft} in times plain decoding: {said}. Choose by your own texts: selfspec calibrate {folder} "
        "--prompt-file FILE"
    )
