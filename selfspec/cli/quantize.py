"""`selfspec quantize`: write a model's weights in fewer bits to a file that drafts read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.options import ModelOptions, Output
from selfspec.cli.outcome import print_json
from selfspec.cli.terminal import console


def quantize(
    model: ModelOptions,
    to: Annotated[Path, typer.Option(metavar="FILE", help="Where the substitutes go: safetensors.")],
    bits: Annotated[int, typer.Option(help="Bits of a weight: 8 or 4.")] = 8,
    group_size: Annotated[int, typer.Option(help="Weights that share a scale, in 4 bits: 32, 64, 128 or 256.")] = 32,
    output: Output = "text",
) -> None:
    """Write the weights in 8 or 4 bits to a file, for `--draft int8:FILE`: a draft then reads them instead of rounding.

    The model stays as it is. The file holds for these weights alone.
    """
    from selfspec.draft import LowPrecision
    from selfspec.files.writing import check_output_file

    draft = LowPrecision(bits, group_size)
    check_output_file(to)
    model.prepare()
    loaded = model.load().model
    began = time.perf_counter()
    draft.save(to, loaded)
    seconds = time.perf_counter() - began
    size, whole = to.stat().st_size, sum(weight.nbytes for weight in loaded.parameters())
    if output == "json":
        print_json({"file": str(to), "bytes": size, "share": size / whole, "seconds": seconds})
        return
    console().print(
        f"{to}: {size:,} bytes, {size / whole:.1%} of the weights, in {seconds:.1f} s; "
        f"use it with --draft int{bits}:{to}",
        soft_wrap=True,
    )
