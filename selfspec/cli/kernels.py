"""`selfspec kernels`: build the CPU kernels, once for a machine."""

from __future__ import annotations

from typing import Annotated

import typer

from selfspec.cli.options import Output
from selfspec.cli.outcome import print_json
from selfspec.cli.terminal import console


def kernels(
    verbose: Annotated[bool, typer.Option(help="Show what the compiler prints.")] = False,
    output: Output = "text",
) -> None:
    """Build the CPU kernels with this machine's C++ compiler, once: 15 to 60 seconds.

    They read weights at the speed of memory, for up to sixteen tokens at once. Later processes load them by themselves.
    Nothing needs them: without them torch's own products run.
    """
    from rich.console import Console

    from selfspec.kernels.native import build_kernels

    with Console(stderr=True).status("Building the CPU kernels"):
        library = build_kernels(verbose)
    if output == "json":
        print_json({"kernels": str(library)})
    else:
        console().print(f"The CPU kernels are built, and used from now on: {library}", soft_wrap=True)
