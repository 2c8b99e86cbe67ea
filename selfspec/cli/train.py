"""`selfspec train`: teach a model to exit early, or train what exits early for it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from selfspec.cli.options import Machine, Model, Output, OutputFormat, Threads, grouped, prepare_process
from selfspec.cli.outcome import print_json
from selfspec.cli.terminal import console, figures_table, progress_bar
from selfspec.errors import TrainingError
from selfspec.measure.embedded import model_place

if TYPE_CHECKING:
    from selfspec.tools.train.course import Course, Observer
    from selfspec.tools.train.jobs import Source
    from selfspec.tools.train.recipe import Recipe

_NUMBERS = re.compile(r"\d{1,18}(,\d{1,18})*", re.ASCII)

train = typer.Typer(
    name="train",
    help="Train drafts that the full model accepts. Repeat an interrupted command to resume it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

To = Annotated[Path, typer.Option(metavar="FOLDER", help="Where the result goes. Repeat the command to resume there.")]
Exits = Annotated[str, typer.Option(metavar="LAYERS", help="Exit layers to train, e.g. 2,3,4.")]
HeldOutBlocks = Annotated[int, typer.Option(min=1, help="Measure on at most N blocks.")]
Length = Annotated[int, typer.Option(min=8, help="Tokens of a block.")]
LearningRate = Annotated[float, typer.Option(help="Highest learning rate of AdamW.")]
Decay = Annotated[float, typer.Option(help="Share of the steps, the last, over which the rate falls.")]
Files = Annotated[
    list[Path], typer.Option(help='Text to learn from: JSONL with "text" in each line, or plain; also .gz.')
]


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Text."""

    text: Files
    held_out: Annotated[Path | None, typer.Option(help="Text to measure on; default: a part of --text.")] = None
    held_out_blocks: HeldOutBlocks = 32

    def source(self, model: str, device: str) -> Source:
        """Text, model and device."""
        from selfspec.tools.train.jobs import Source

        return Source(model_place(model), tuple(self.text), self.held_out, self.held_out_blocks, device)


@dataclass(frozen=True, kw_only=True)
class CourseOptions:
    """Steps and learning rate."""

    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 1000
    batch: Annotated[int, typer.Option(min=1, help="Blocks a step, on each device.")] = 8
    accumulate: Annotated[int, typer.Option(min=1, help="Batches summed up into one step.")] = 1
    length: Length = 256
    learning_rate: LearningRate = 5e-4
    warmup: Annotated[float, typer.Option(help="Share of the steps over which the rate rises.")] = 0.05
    decay: Decay = 0.4
    precision: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(metavar="DTYPE", help="Compute in `float32` or `bfloat16`; weights are float32."),
    ] = "float32"
    seed: Annotated[int, typer.Option(help="Seed of the order of the text, of dropout and of new weights.")] = 0
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between measurements.")] = 100
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write logs for TensorBoard as well.")] = False

    def course(self) -> Course:
        """Checked.

        Raises:
            TrainingError: a value is out of range.
        """
        from selfspec.tools.train.course import Course

        return Course(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class HeadCourseOptions(CourseOptions):
    """Steps and learning rate."""

    learning_rate: LearningRate = 2e-3
    decay: Decay = 0.8


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Recipe."""

    exits: Exits = ""
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


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Heads."""

    exits: Exits = ""
    rank: Annotated[int | None, typer.Option(min=1, help="Width of each head's MLP; default: twice the model's.")] = (
        None
    )
    loss: Annotated[
        Literal["kl", "tv", "both"],
        typer.Option(help="`kl`: divergence from the full model; `tv`: total variation, 1 - alpha; `both`: sum."),
    ] = "both"
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Draft only the N most frequent tokens of the text.")
    ] = None
    own_texts: Annotated[
        int, typer.Option(min=0, help="Learn from N texts that the model continues from beginnings.")
    ] = 0
    beginning: Annotated[int, typer.Option(min=1, help="Tokens of each beginning.")] = 16


@train.command()
@grouped
def layerskip(
    model: Model,
    to: To,
    text: Texts,
    recipe: RecipeOptions,
    course: CourseOptions,
    machine: Machine,
    output: Output = "text",
) -> None:
    """Continue a checkpoint by the LayerSkip recipe (Elhoushi et al., 2024), so that early exits draft well.

    The weights change; the report says what that costs the full model on held-out text.
    """
    exits = parse_exits(recipe.exits)

    from selfspec.tools.train.recipe import Recipe

    made = Recipe(**{**asdict(recipe), "exits": exits})
    _continue(text.source(model, machine.device), course.course(), made, to, machine.threads, output)


@train.command()
@grouped
def plain(model: Model, to: To, text: Texts, course: CourseOptions, machine: Machine, output: Output = "text") -> None:
    """Continue a checkpoint on text as `train layerskip` does, but without its recipe: what to compare that with."""
    _continue(text.source(model, machine.device), course.course(), None, to, machine.threads, output)


@train.command("exit")
@grouped
def exit_heads(
    model: Model,
    to: To,
    text: Texts,
    heads: HeadOptions,
    course: HeadCourseOptions,
    machine: Machine,
    output: Output = "text",
) -> None:
    """Train exit heads for a base that stays as it is: a side-car of a few MB, for `--draft head:FOLDER`.

    Heads learn the full model's own distribution; alpha = 1 - TV is the acceptance rate to expect.
    """
    exits = parse_exits(heads.exits)

    from selfspec.tools.train.exit_job import ExitPlan, train_exit

    plan = ExitPlan(**{**asdict(heads), "exits": exits})
    source, planned = text.source(model, machine.device), course.course()
    _prepare(machine.threads)
    with _progress() as observe:
        report = train_exit(source, planned, plan, to, observe)
    _show(report, to, output)


@train.command()
@grouped
def average(
    trained: Annotated[str, typer.Argument(metavar="TRAINED", help="What `train layerskip` made.")],
    base: Annotated[str, typer.Argument(metavar="BASE", help="The checkpoint it was made from.")],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the new checkpoint goes.")],
    base_share: Annotated[float, typer.Option(help="Weight of the base, between 0 and 1.")] = 0.1,
    held_out: Annotated[Path | None, typer.Option(help="Text to measure on, before and after; default: none.")] = None,
    held_out_blocks: HeldOutBlocks = 32,
    length: Length = 256,
    threads: Threads = None,
    output: Output = "text",
) -> None:
    """Average a trained checkpoint with its base: a little less of what was taught, for a better full model."""
    from selfspec.tools.train.average import Average
    from selfspec.tools.train.average import average as run

    _prepare(threads)
    wanted = Average(model_place(trained), model_place(base), base_share, held_out, held_out_blocks, length)
    with progress_bar("averaging") as bar:
        bar.add_task("reading, averaging, measuring", total=None)
        report = run(wanted, to)
    _show(report, to, output)


@train.command()
@grouped
def vocabulary(
    model: Model,
    text: Files,
    to: Annotated[Path, typer.Option(help="The JSON file to write.")],
    size: Annotated[int, typer.Option(min=1, help="Tokens to keep.")],
    output: Output = "text",
) -> None:
    """Count which tokens a draft needs, for `--draft exit:4+vocab:FILE`: its steps then read only their rows."""
    from selfspec.environment import versions
    from selfspec.tools.train.vocabulary import count_vocabulary

    _prepare(threads=None)
    counted = count_vocabulary(model_place(model), text, size, to)
    if output == "json":
        print_json({"file": str(to), "size": size, "coverage": counted.coverage, "versions": versions()})
    else:
        print(f"{to}: {size} of {counted.vocabulary} tokens, {counted.coverage:.2%} of the text")


def parse_exits(text: str) -> tuple[int, ...]:
    """Exit layers from `2,3,4`; none from an empty text.

    Raises:
        TrainingError: it is something else.
    """
    given = text.replace(" ", "")
    if not given:
        return ()
    if not _NUMBERS.fullmatch(given):
        raise TrainingError(f"--exits {text!r} is not understood; write exit layers with commas between, e.g. 2,3,4")
    return tuple(int(number) for number in given.split(","))


def _continue(
    source: Source, course: Course, recipe: Recipe | None, to: Path, threads: int | None, output: OutputFormat
) -> None:
    """Continue a checkpoint, with a recipe or without, and print the figures before and after."""
    from selfspec.tools.train.jobs import train_layerskip

    _prepare(threads)
    with _progress() as observe:
        report = train_layerskip(source, course, recipe, to, observe)
    _show(report, to, output)


def _prepare(threads: int | None) -> None:
    import torch
    from transformers.utils import logging

    prepare_process(threads)
    logging.disable_progress_bar()
    # Subnormal numbers are many times slower than others on some processors.
    torch.set_flush_denormal(True)


@contextmanager
def _progress() -> Iterator[Observer]:
    """An observer of the training: a bar with the time left, or a line for each figure where there is no bar."""
    with progress_bar("training") as bar:
        task = bar.add_task("", total=None)

        def observe(step: int, steps: int, figures: Mapping[str, float]) -> None:
            said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if name != "epoch")
            if bar.disable and said:
                print(f"step {step}/{steps}: {said}", file=sys.stderr, flush=True)
            bar.update(task, total=steps, completed=step)
            if "loss" in figures:
                bar.update(task, description=f"loss {figures['loss']:.3f}")

        yield observe


def _show(report: Mapping[str, Any], to: Path, output: OutputFormat) -> None:
    """Print what a training did to the figures on the held-out text."""
    from selfspec.environment import versions

    if output == "json":
        print_json({**report, "folder": str(to), "versions": versions()})
        return
    table = figures_table(f"On held-out text; the result is in {to}", ["figure"], ["before", "after"])
    for name, after in report["after"].items():
        before = report["before"].get(name)
        table.add_row(name, "" if before is None else f"{before:.3f}", f"{after:.3f}")
    console().print(table)
