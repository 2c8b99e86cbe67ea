"""`selfspec train`: teach a model to exit early, or train what exits early for it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec.cli.options import Model, Output, OutputFormat, Threads, WholeMachine, grouped, prepare_process
from selfspec.cli.outcome import print_json
from selfspec.cli.terminal import console, counting_bar, figures_table, progress_bar
from selfspec.errors import UnsupportedOptionError
from selfspec.measure.embedded import model_place
from selfspec.tools.train.recipe import ExitHeadRecipe, LayerSkipRecipe
from selfspec.tools.train.settings import Averaging, Course, Files, HeadCourse, Texts

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

To = Annotated[Path, typer.Option(metavar="FOLDER", help="Where the result goes. Repeat the command to resume there.")]


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
) -> None:
    """Continue a checkpoint by the LayerSkip recipe (Elhoushi et al., 2024), so that early exits draft well.

    The weights change; the report says what that costs the full model on held-out text.
    """
    if not check_seconds < math.inf:
        raise UnsupportedOptionError(f"--check-seconds {check_seconds:g} never ends; give e.g. 15")
    report = _train(model, text, course, recipe, to, machine)

    from selfspec.cli.train_check import check_exits, verdict

    checked = check_exits(to, machine.device, report["after"], check_seconds)
    _show({**report, "checked": [asdict(each) for each in checked]}, to, output)
    if output == "text":
        print(verdict(checked, to))


@train.command()
@grouped
def plain(model: Model, to: To, text: Texts, course: Course, machine: WholeMachine, output: Output = "text") -> None:
    """Continue a checkpoint on text as `train layerskip` does, but without its recipe: what to compare that with."""
    _show(_train(model, text, course, None, to, machine), to, output)


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
) -> None:
    """Train exit heads for a base that stays as it is: a side-car of a few MB, for `--draft head:FOLDER`.

    Heads learn the full model's own distribution; alpha = 1 - TV is the acceptance rate to expect.
    """
    _show(_train(model, text, course, heads, to, machine), to, output)


@train.command()
@grouped
def average(
    trained: Annotated[str, typer.Argument(metavar="TRAINED", help="What `train layerskip` made.")],
    base: Annotated[str, typer.Argument(metavar="BASE", help="The checkpoint it was made from.")],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the new checkpoint goes.")],
    averaging: Averaging,
    threads: Threads = None,
    output: Output = "text",
) -> None:
    """Average a trained checkpoint with its base: a little less of what was taught, for a better full model."""
    from selfspec.tools.train.average import average as run

    _prepare(threads)
    with progress_bar("averaging") as bar:
        bar.add_task("reading, averaging, measuring", total=None)
        report = run(model_place(trained), model_place(base), averaging, to)
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
    coverage = count_vocabulary(model_place(model), text, size, to)
    if output == "json":
        print_json({"file": str(to), "size": size, "coverage": coverage, "versions": versions()})
    else:
        print(f"{to}: {size} tokens, {coverage:.2%} of the text")


def _train(
    model: str,
    text: Texts,
    course: Course,
    recipe: LayerSkipRecipe | ExitHeadRecipe | None,
    to: Path,
    machine: WholeMachine,
) -> dict[str, Any]:
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

        return run(model_place(model), text, course, recipe, to, observe, machine.device)


def _prepare(threads: int | None) -> None:
    import torch
    from transformers.utils import logging

    prepare_process(threads)
    logging.disable_progress_bar()
    # Subnormal numbers are many times slower than others on some processors.
    torch.set_flush_denormal(True)


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
