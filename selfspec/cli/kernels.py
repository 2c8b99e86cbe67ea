"""`selfspec kernels`: build the CPU kernels, once for a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console


@dataclass(frozen=True)
class Built:
    """`selfspec kernels`.

    Attributes:
        kernels: the library that was built.
    """

    kernels: str

    def __str__(self) -> str:
        return f"The CPU kernels are built, and used from now on: {self.kernels}"


def kernels(verbose: Annotated[bool, typer.Option(help="Show what the compiler prints.")] = False) -> Built:
    """Build the CPU kernels with this machine's C++ compiler, once: 15 to 60 seconds.

    They read weights at the speed of memory, for up to sixteen tokens at once. Later processes load them by themselves.
    Nothing needs them: without them torch's own products run.
    """
    from selfspec.kernels.native import build_kernels

    with Console(stderr=True).status("Building the CPU kernels"):
        return Built(str(build_kernels(verbose)))
