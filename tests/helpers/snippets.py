"""Code and output as they stand in Markdown, commands as tests run them, and budgets as they write them."""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from rich.console import Console
from rich.progress import track
from transformers.utils import logging

from selfspec.placement.plan import SLOTS, Bandwidth, Memory, Plan, plan_memory

ROOT = Path(__file__).resolve().parents[2]
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def snippets(page: str, language: str) -> list[str]:
    """The fenced blocks of a page that say they are in a language, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [body for named, body in _FENCED.findall(text) if named == language]


def run_types(
    description: str | None,
    types: Sequence[str],
    run: Callable[[str], tuple[str, bool]],
    page: Callable[[list[str]], str],
) -> int:
    """Run the types that the command line names; return whether one does not hold, as an exit status."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; none: all")
    parser.add_argument("--write", type=Path, help="file to write the page to, if all types hold")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    console = Console(stderr=True)
    lines, broken = [], 0
    for name in track(options.types or types, description="types", console=console):
        said, holds = run(name)
        console.print(said, highlight=False, markup=False)
        lines.append(said)
        broken += not holds
    if options.write and not broken and not options.types:
        options.write.write_text(page(lines), encoding="utf-8")
    console.print(f"{len(lines) - broken} of {len(lines)} hold")
    return int(broken > 0)


@dataclass(frozen=True)
class Ending:
    status: int
    stdout: str
    stderr: str


class Invoke(Protocol):
    """Runs `selfspec WORDS` with `stdin` piped in."""

    def __call__(self, *words: str, stdin: bytes = b"") -> Ending: ...


class Said(Protocol):
    """Runs a command that succeeds, and returns what it says as JSON."""

    def __call__(self, *words: str, stdin: bytes = b"") -> dict[str, Any]: ...


def tight_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every budget be one that all layers but one are streamed within."""

    def tight(
        memory: Memory, budget: int, bandwidth: Bandwidth, formats: Sequence[str], beside: str | None = None
    ) -> Plan:
        rounded = sum(memory.substitutes["int8"][1:])
        enough = memory.least + memory.layers[0] + rounded + SLOTS * memory.largest
        return plan_memory(memory, enough, bandwidth, formats, beside)

    monkeypatch.setattr("selfspec.placement.place.plan_memory", tight)
