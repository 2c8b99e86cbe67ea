"""`selfspec train`: teach a model to exit early, or train what exits early for it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec.cli.ablate import prepare_quietly
from selfspec.cli.options import MachineOptions, Model, Output, OutputFormat, grouped
from selfspec.cli.terminal import console, figures_table, progress_bar
from selfspec.measure.embedded import model_place
from selfspec.tools.train.recipe import (
    Course,
    ExitHeadRecipe,
    Files,
    HeadRecipe,
    LayerSkipRecipe,
    Texts,
)

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
# Figures of each exit.
_OF_EXITS = ("agreement", "alpha", "speedup")
To = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the result. Repeat the command to resume.")]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """`selfspec train layerskip`, `exit` and `head`.

    Attributes:
        base: fingerprint of the weights it began with.
        made_with: versions, commit and machine.
        before: figures on held-out text.
        resumed_at: the step it went on from; 0: it began anew.
        doubts: what looked wrong on the way.
    """

    source: dict[str, Any]
    base: str
    course: dict[str, Any]
    recipe: dict[str, Any]
    made_with: dict[str, Any]
    before: dict[str, float]
    after: dict[str, float]
    resumed_at: int
    seconds_of_last_stretch: float
    doubts: list[str]
    log: list[dict[str, float]]
    folder: str


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
    machine: MachineOptions,
    output: Output = "text",
) -> Trained:
    """Continue a checkpoint by the LayerSkip recipe (Elhoushi et al., 2024), so that early exits draft well.

    The weights change; the report says what that costs the full model on held-out text. With `--dropout 0 --exit-scale
    0` it is plain training, to compare that with.
    """
    return _shown(_train(model, text, course, recipe, to, machine), output, str(to))


@train.command("exit")
@grouped
def exit_heads(
    model: Model,
    to: To,
    text: Texts,
    heads: ExitHeadRecipe,
    course: Course,
    machine: MachineOptions,
    output: Output = "text",
) -> Trained:
    """Train exit heads for a base that stays as it is: a side-car of a few MB, for `--draft head:FOLDER`.

    Heads learn the full model's own distribution; alpha = 1 - TV is the acceptance rate to expect.
    """
    return _shown(_train(model, text, course, heads, to, machine), output, f"{model} --draft head:{to}")


@train.command()
@grouped
def head(
    model: Model,
    to: To,
    text: Texts,
    recipe: HeadRecipe,
    course: Course,
    machine: MachineOptions,
    output: Output = "text",
) -> Trained:
    """Train an EAGLE-3 head for a base model, which is not changed, in the layout that other engines read.

    `--draft eagle:FOLDER` drafts with it. Agreement and alpha of each drafted token are the acceptance rates to expect.
    """
    return _shown(_train(model, text, course, recipe, to, machine), output)


@train.command()
@grouped
def vocabulary(
    model: Model,
    text: Files,
    to: Annotated[Path, typer.Option(help="The JSON file to write.")],
    size: Annotated[int, typer.Option(min=1, help="Tokens to keep.")],
) -> Counted:
    """Count which tokens a draft needs, for `--draft exit:4+vocab:FILE`: its steps then read only their rows."""
    from selfspec.tools.train.corpus import count_vocabulary

    _prepare(threads=None)
    return Counted(str(to), size, count_vocabulary(model_place(model), text, size, to))


def _train(
    model: str,
    text: Texts,
    course: Course,
    recipe: LayerSkipRecipe | ExitHeadRecipe | HeadRecipe,
    to: Path,
    machine: MachineOptions,
) -> Trained:
    """Train, and return the figures before and after."""
    from selfspec.tools.train.run import doubts, resumed_step, run

    _prepare(machine.threads)
    printed: set[str] = set()
    seen: list[Mapping[str, float]] = []

    def say(line: str, key: str) -> None:
        # What is measured in the last step is measured again at the end.
        if key not in printed:
            printed.add(key)
            # Where there is a bar, above it.
            print(line, file=sys.stderr, flush=True)

    if step := resumed_step(to):
        say(f"step {step}: resumed from the checkpoint of this step in {to}", "resumed")
    with progress_bar("training") as bar:

        def observe(step: int, steps: int, figures: Mapping[str, float]) -> None:
            bar.reach(step, steps, f"{step} of {steps}")
            if figures:
                seen.append(figures)
                said = _line(figures)
                if said:
                    say(f"step {step}/{steps}: {said}", said)
                for doubt in doubts(seen[0], seen[1:]):
                    # Once each, whatever its figures.
                    say(f"warning: {doubt}", doubt.partition(" rose ")[0])

        report = run(model_place(model), text, course, recipe, to, observe, machine.device)
    from accelerate import PartialState

    if not PartialState().is_main_process:
        # What a distributed training made is checked and said once.
        raise typer.Exit
    return Trained(**report, folder=str(to))


def _pair(result: Trained, name: str) -> str:
    return f"{result.before.get(name, math.nan):.3f}  {result.after[name]:.3f}"


def _exits(figures: Mapping[str, float]) -> list[str]:
    return [name.removeprefix("speedup_") for name in figures if name.startswith("speedup_")]


def _line(figures: Mapping[str, float]) -> str:
    """Say some figures in a line, of exits those of the best."""
    exits = _exits(figures)
    best = max(exits, key=lambda layer: figures[f"speedup_{layer}"], default=None)
    others = {f"{figure}_{layer}" for figure in _OF_EXITS for layer in exits if layer != best}
    said = [f"{name} {value:.4g}" for name, value in figures.items() if name not in _UNSAID | others]
    return ", ".join(said)


def _prepare(threads: int | None) -> None:
    import torch

    prepare_quietly(threads)
    # Subnormal numbers are many times slower than others on some processors.
    torch.set_flush_denormal(True)


def _shown(result: Trained, output: OutputFormat, calibrated: str | None = None) -> Trained:
    """Print what a training did to the figures on the held-out text, and how to measure its exits, unless in JSON."""
    if output == "json":
        return result
    table = figures_table(None, ["held out"], ["loss", "agreement", "alpha", "speed-up"])
    if "held_out_loss" in result.after:
        table.add_row("full model", _pair(result, "held_out_loss"), "", "", "")
    for layer in _exits(result.after):
        table.add_row(f"exit {layer}", "", *(_pair(result, f"{figure}_{layer}") for figure in _OF_EXITS))
    if "accepted_greedily" in result.after:
        drafted = [name.removeprefix("alpha_") for name in result.after if name.startswith("alpha_")]
        for token in drafted:
            table.add_row(f"token {token}", "", *(_pair(result, f"{figure}_{token}") for figure in _OF_EXITS[:2]), "")
        table.add_row("accepted of a greedy draft", "", _pair(result, "accepted_greedily"), "", "")
    console().print(table)
    print(
        f"Before and after, in {result.folder}. Loss: nats a token. Agreement: top-1, with the full model. Alpha: 1 - "
        "TV, the acceptance to expect. Speed-up: predicted from the weights a draft step reads, an upper bound."
    )
    notes = [f"It was resumed at step {result.resumed_at}."] if result.resumed_at else []
    notes += [f"Warning: {doubt}." for doubt in result.doubts]
    notes += [] if calibrated is None else [f"What exits are worth here: selfspec calibrate {calibrated}"]
    print(*notes, sep="\n")
    return result
