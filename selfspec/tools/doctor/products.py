"""How fast this machine multiplies the few rows that decoding consists of: what plain and drafted decoding rest on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from selfspec.kernels import native

# Of a layer of a model of 1B: larger than caches.
_INPUTS, _OUTPUTS = 2048, 5632
_TIMES = 9
_ROWS = 4


@dataclass(frozen=True)
class Products:
    """Products of one row and of four with a weight of 46 MB in float32, as torch makes them and as the kernels do.

    Attributes:
        gigabytes_a_second: of the weight, read by a product of one row.
        four_rows: what a product of four rows takes, in products of one.
    """

    gigabytes_a_second: float
    four_rows: float


def time_products() -> dict[str, Products]:
    """Time them on the CPU, in some tenths of a second: `torch`, and `kernels` where these are loaded."""
    weight = torch.zeros(_OUTPUTS, _INPUTS)
    ways: dict[str, Callable[[Tensor], Tensor]] = {"torch": lambda states: linear(states, weight)}
    if native.are_loaded():
        ways["kernels"] = lambda states: native.few_rows(states, weight, None)
    return {name: _timed(way, weight) for name, way in ways.items()}


@torch.no_grad()
def _timed(way: Callable[[Tensor], Tensor], weight: Tensor) -> Products:
    one, four = (_seconds(way, torch.zeros(rows, _INPUTS)) for rows in (1, _ROWS))
    return Products(weight.nbytes / one / 1e9, four / one)


def _seconds(way: Callable[[Tensor], Tensor], states: Tensor) -> float:
    taken = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        way(states)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
