"""`selfspec train`: teach a model to leave early, or train what leaves early for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from selfspec.cli.options import Device, Output, Threads
from selfspec.cli.train_options import (
    Accumulate,
    Batch,
    Decay,
    EvaluateEvery,
    Exits,
    HeldOut,
    HeldOutBlocks,
    LearningRate,
    Length,
    Model,
    Precision,
    SaveEvery,
    Seed,
    Steps,
    TensorBoard,
    Text,
    To,
    Warmup,
    parse_exits,
)

train = typer.Typer(
    name="train",
    help="Train drafts that the full model accepts. Repeating a command goes on where it was interrupted.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@train.command()
def layerskip(
    model: Model,
    text: Text,
    to: To,
    held_out: HeldOut = None,
    held_out_blocks: HeldOutBlocks = 32,
    exits: Exits = "",
    dropout: Annotated[float, typer.Option("--dropout", help="Chance that a sample skips the last layer.")] = 0.1,
    dropout_curriculum: Annotated[
        Literal["constant", "exponential"],
        typer.Option("--dropout-curriculum", help="Whether that chance rises from 0 over the training."),
    ] = "constant",
    curriculum: Annotated[
        Literal["rotational", "gradual", "all"],
        typer.Option("--curriculum", help="Which exits take part: every R-th in turn, ever earlier ones, or all."),
    ] = "rotational",
    rotation: Annotated[int, typer.Option("--rotation", min=1, help="R of the rotational curriculum.")] = 4,
    exit_scale: Annotated[
        float, typer.Option("--exit-scale", help="How much exits weigh against the full model.")
    ] = 0.2,
    weighting: Annotated[
        Literal["depth", "even"], typer.Option("--weighting", help="Exits weigh more with depth, or all the same.")
    ] = "depth",
    exit_target: Annotated[
        Literal["text", "model"],
        typer.Option("--exit-target", help="Exits learn the text's next token, or the full model's distribution."),
    ] = "text",
    steps: Steps = 1000,
    batch: Batch = 8,
    accumulate: Accumulate = 1,
    length: Length = 256,
    learning_rate: LearningRate = 5e-4,
    warmup: Warmup = 0.05,
    decay: Decay = 0.4,
    precision: Precision = "float32",
    seed: Seed = 0,
    save_every: SaveEvery = 100,
    evaluate_every: EvaluateEvery = 100,
    tensorboard: TensorBoard = False,
    device: Device = "auto",
    threads: Threads = None,
    output: Output = "text",
) -> None:
    """Continue a checkpoint by the LayerSkip recipe (Elhoushi et al., 2024), so that early exits draft well.

    The weights change; the report says what that costs the full model on held-out text.
    """
    chosen = parse_exits(exits)

    from selfspec.cli.train_run import run_layerskip
    from selfspec.tools.train.course import Course
    from selfspec.tools.train.jobs import Source
    from selfspec.tools.train.recipe import Recipe

    recipe = Recipe(
        exits=chosen,
        dropout=dropout,
        dropout_curriculum=dropout_curriculum,
        curriculum=curriculum,
        rotation=rotation,
        exit_scale=exit_scale,
        weighting=weighting,
        exit_target=exit_target,
    )
    course = Course(
        steps=steps,
        batch=batch,
        accumulate=accumulate,
        length=length,
        learning_rate=learning_rate,
        warmup=warmup,
        decay=decay,
        precision=precision,
        seed=seed,
        save_every=save_every,
        evaluate_every=evaluate_every,
        tensorboard=tensorboard,
    )
    source = Source(model, tuple(text), held_out, held_out_blocks, device)
    run_layerskip(source, course, recipe, to, threads, output)


@train.command()
def plain(
    model: Model,
    text: Text,
    to: To,
    held_out: HeldOut = None,
    held_out_blocks: HeldOutBlocks = 32,
    steps: Steps = 1000,
    batch: Batch = 8,
    accumulate: Accumulate = 1,
    length: Length = 256,
    learning_rate: LearningRate = 5e-4,
    warmup: Warmup = 0.05,
    decay: Decay = 0.4,
    precision: Precision = "float32",
    seed: Seed = 0,
    save_every: SaveEvery = 100,
    evaluate_every: EvaluateEvery = 100,
    tensorboard: TensorBoard = False,
    device: Device = "auto",
    threads: Threads = None,
    output: Output = "text",
) -> None:
    """Continue a checkpoint on text as `train layerskip` does, but without its recipe: what to compare that with."""
    from selfspec.cli.train_run import run_layerskip
    from selfspec.tools.train.course import Course
    from selfspec.tools.train.jobs import Source

    course = Course(
        steps=steps,
        batch=batch,
        accumulate=accumulate,
        length=length,
        learning_rate=learning_rate,
        warmup=warmup,
        decay=decay,
        precision=precision,
        seed=seed,
        save_every=save_every,
        evaluate_every=evaluate_every,
        tensorboard=tensorboard,
    )
    source = Source(model, tuple(text), held_out, held_out_blocks, device)
    run_layerskip(source, course, None, to, threads, output)


@train.command("exit")
def exit_heads(
    model: Model,
    text: Text,
    to: To,
    held_out: HeldOut = None,
    held_out_blocks: HeldOutBlocks = 32,
    exits: Exits = "",
    rank: Annotated[
        int | None, typer.Option("--rank", min=1, help="Width of each head's MLP; default: twice the model's.")
    ] = None,
    loss: Annotated[
        Literal["kl", "tv", "both"],
        typer.Option("--loss", help="Divergence from the full model, total variation (1 - alpha), or their sum."),
    ] = "both",
    vocabulary: Annotated[
        int | None,
        typer.Option("--vocabulary", min=1, help="Draft only the most frequent tokens of the text, this many."),
    ] = None,
    own_texts: Annotated[
        int,
        typer.Option(
            "--own-texts",
            min=0,
            help="Learn from texts that the model itself writes on from the given text's beginnings.",
        ),
    ] = 0,
    beginning: Annotated[int, typer.Option("--beginning", min=1, help="Tokens of each beginning.")] = 16,
    steps: Steps = 1000,
    batch: Batch = 8,
    accumulate: Accumulate = 1,
    length: Length = 256,
    learning_rate: LearningRate = 2e-3,
    warmup: Warmup = 0.05,
    decay: Decay = 0.8,
    precision: Precision = "float32",
    seed: Seed = 0,
    save_every: SaveEvery = 100,
    evaluate_every: EvaluateEvery = 100,
    tensorboard: TensorBoard = False,
    device: Device = "auto",
    threads: Threads = None,
    output: Output = "text",
) -> None:
    """Train exit heads for a base that stays as it is: a side-car of a few MB, for `--draft head:FOLDER`.

    Heads learn the full model's own distribution; alpha = 1 - TV is the acceptance rate to expect.
    """
    chosen = parse_exits(exits)

    from selfspec.cli.train_run import run_exit
    from selfspec.tools.train.course import Course
    from selfspec.tools.train.exit_job import ExitPlan
    from selfspec.tools.train.jobs import Source

    plan = ExitPlan(chosen, rank, loss, vocabulary, own_texts, beginning)
    course = Course(
        steps=steps,
        batch=batch,
        accumulate=accumulate,
        length=length,
        learning_rate=learning_rate,
        warmup=warmup,
        decay=decay,
        precision=precision,
        seed=seed,
        save_every=save_every,
        evaluate_every=evaluate_every,
        tensorboard=tensorboard,
    )
    source = Source(model, tuple(text), held_out, held_out_blocks, device)
    run_exit(source, course, plan, to, threads, output)


@train.command()
def average(
    trained: Annotated[str, typer.Argument(metavar="TRAINED", help="What `train layerskip` made.")],
    base: Annotated[str, typer.Argument(metavar="BASE", help="The checkpoint it was made from.")],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Where the new checkpoint goes.")],
    base_share: Annotated[float, typer.Option("--base-share", help="Weight of the base, between 0 and 1.")] = 0.1,
    held_out: Annotated[
        Path | None, typer.Option("--held-out", help="Text to measure on, before and after; default: none.")
    ] = None,
    held_out_blocks: Annotated[int, typer.Option("--held-out-blocks", min=1, help="Blocks of it.")] = 32,
    length: Annotated[int, typer.Option("--length", min=8, help="Tokens of a block.")] = 256,
    threads: Threads = None,
    output: Output = "text",
) -> None:
    """Average a trained checkpoint with its base: a little less of what was taught, for a better full model."""
    from selfspec.cli.train_run import run_average
    from selfspec.tools.train.average import Average

    run_average(Average(trained, base, base_share, held_out, held_out_blocks, length), to, threads, output)


@train.command()
def vocabulary(
    model: Model,
    text: Text,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The JSON file to write.")],
    size: Annotated[int, typer.Option("--size", min=1, help="Tokens to keep.")],
    output: Output = "text",
) -> None:
    """Count which tokens a draft needs, for `--draft exit:4+vocab:FILE`: its steps then read only their rows."""
    from selfspec.cli.train_run import run_vocabulary

    run_vocabulary(model, tuple(text), size, to, output)
