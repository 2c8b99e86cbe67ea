"""Decide up to how many rows the kernels' product is faster than torch's, once for a machine.

The product decides the last bits of a result, so a seed gives the same tokens only where the choice does not change. A
table holds what the stage `rows` of benchmarks/device and times of prompts by their length showed; on a processor that
it lacks a trial of half a second decides, whose result is kept in the user's cache.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch.nn.functional import linear

from selfspec.device import device_name
from selfspec.errors import StorageError
from selfspec.files.writing import write_json
from selfspec.kernels import native
from selfspec.process import cache_folder

_WIDE = 2048
# Rows that a trial compares, and weights: outputs and inputs, narrow and wide.
_ROWS = (16, 32, 64, 128, 256, 512, 1024)
_NARROW_WEIGHT, _WIDE_WEIGHT = (1536, 576), (1024, 4096)
_TIMES = 5
_FEWEST = 10


@dataclass(frozen=True)
class Crossover:
    """Holds the most rows for which the kernels' product is the faster one.

    Attributes:
        narrow: with weights of up to 2,048 inputs.
        wide: with more.
        bfloat16: with weights in bfloat16, for which torch uses instructions of its own at more rows, where there are
            some.
        float16: with weights in float16, the same.
    """

    narrow: int
    wide: int
    bfloat16: int
    float16: int

    def rows(self, dtype: torch.dtype, inputs: int) -> int:
        """Return the most rows for weights of a dtype and a number of inputs; `MOST_ROWS`: any number."""
        if dtype.itemsize == 2:
            return self.bfloat16 if dtype == torch.bfloat16 else self.float16
        return self.wide if inputs > _WIDE else self.narrow


_CAUTIOUS = Crossover(16, 16, _FEWEST, _FEWEST)


@cache
def crossover() -> Crossover:
    """Return this machine's: measured, kept from an earlier trial, or by a trial."""
    library, processor = native.library(), device_name(torch.device("cpu"))
    variant = "none" if library is None else library.variant
    is_amd = processor.startswith("AMD")
    if variant == "v3":
        # Without AVX-512 torch multiplies numbers of 16 bits one by one.
        return Crossover(64 if is_amd else 16, 32 if is_amd else 16, native.MOST_ROWS, native.MOST_ROWS)
    if variant not in ("vnni", "v4"):
        return _CAUTIOUS
    if is_amd:
        return Crossover(native.MOST_ROWS, 128, _FEWEST, native.MOST_ROWS)
    file = cache_folder() / f"crossover-{variant}.json"
    kept = _read(file, processor)
    if kept is None:
        # A folder that cannot be written to costs a trial for each process.
        with suppress(StorageError):
            write_json(file, {processor: astuple(tried())})
        # Another process may have kept its own at the same time: all take what is there.
        kept = _read(file, processor)
    return _CAUTIOUS if kept is None else kept


def tried() -> Crossover:
    """Time both products on this machine, by turns, over more and more rows, until torch's is faster."""
    halves = (_most(dtype, _NARROW_WEIGHT) for dtype in (torch.bfloat16, torch.float16))
    return Crossover(_most(torch.float32, _NARROW_WEIGHT), _most(torch.float32, _WIDE_WEIGHT), *halves)


@torch.no_grad()
def _most(dtype: torch.dtype, shape: tuple[int, int]) -> int:
    weight, most = torch.ones(shape, dtype=dtype), _FEWEST
    for rows in _ROWS:
        states = torch.ones(rows, shape[1], dtype=dtype)
        ways = partial(native.few_rows, states, weight, None), partial(linear, states, weight)
        own, torchs = zip(*(tuple(map(_seconds, ways)) for _ in range(_TIMES)), strict=True)
        if statistics.median(own) > statistics.median(torchs):
            break
        most = rows
    return most


def _seconds(product: Callable[[], object]) -> float:
    started = time.perf_counter()
    product()
    return time.perf_counter() - started


def _read(file: Path, processor: str) -> Crossover | None:
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = Crossover(*json.loads(file.read_text())[processor])
        return found if all(type(each) is int and each > 0 for each in astuple(found)) else None
    return None
