"""Options that the training commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from selfspec.errors import TrainingError

Model = Annotated[str, typer.Argument(help="The base: a folder with config.json, model.safetensors, tokenizer.json.")]
Text = Annotated[
    list[Path],
    typer.Option(
        "--text", metavar="FILE", help='Text to learn from: JSONL with "text" in each line, or plain; also as .gz.'
    ),
]
To = Annotated[
    Path, typer.Option("--to", metavar="FOLDER", help="Where the result goes. Repeat the command to go on there.")
]
HeldOut = Annotated[
    Path | None, typer.Option("--held-out", metavar="FILE", help="Text to measure on; default: a part of --text.")
]
HeldOutBlocks = Annotated[int, typer.Option("--held-out-blocks", min=1, help="The most blocks to measure on.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Optimiser steps.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Blocks of a step, on each device.")]
Accumulate = Annotated[int, typer.Option("--accumulate", min=1, help="Batches summed up into one step.")]
Length = Annotated[int, typer.Option("--length", min=8, help="Tokens of a block.")]
LearningRate = Annotated[float, typer.Option("--learning-rate", help="The highest, of AdamW.")]
Warmup = Annotated[float, typer.Option("--warmup", help="Share of the steps over which the rate rises.")]
Decay = Annotated[float, typer.Option("--decay", help="Share of the steps, the last, over which the rate falls.")]
Precision = Annotated[
    Literal["float32", "bfloat16"], typer.Option("--precision", help="What is computed in; weights are float32.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of the order of the text, of dropout and of new weights.")]
SaveEvery = Annotated[int, typer.Option("--save-every", min=1, help="Steps between checkpoints.")]
EvaluateEvery = Annotated[int, typer.Option("--evaluate-every", min=1, help="Steps between measurements.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Write logs for TensorBoard as well.")]
Exits = Annotated[str, typer.Option("--exits", metavar="LAYERS", help="Exit layers to teach, e.g. 2,3,4.")]

_NUMBERS = re.compile(r"\d{1,18}(,\d{1,18})*", re.ASCII)


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
