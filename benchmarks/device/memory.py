"""Memory at the peak of a call, above the weights, by each way to decode."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from device.arms import drafting, plain
from device.figure import Figure, Rows
from device.models import free_memory
from device.stage import Bench, Case

from selfspec.measure.peak_memory import peak_memory
from selfspec.placement.resident import resident_bytes
from selfspec.runtime.named import RuntimeName
from selfspec.tools.bench.arms import ArmSpec, make_arm
from selfspec.tools.bench.cell import Cell

_MIB = 2**20
_UNTOLD = "the system does not tell"


def memory_cases(bench: Bench) -> Iterator[Case]:
    """Each arm at each shape by itself; the model stays from one to the next."""
    cell = Cell("random", 0.0, 1, *((8, 6) if bench.miniature else (2048, 64)))
    for shape in ("1B", "8B"):
        exit_ = f"exit:{max(1, bench.models.config(shape).num_hidden_layers // 4)}"
        specs = [ArmSpec("generate"), ArmSpec("static")]
        specs += plain(RuntimeName.EAGER, RuntimeName.TRACED, RuntimeName.GRAPHS)
        specs += drafting([exit_, "int8", "int4", "lookup"], RuntimeName.GRAPHS)
        for spec in specs:
            yield Case(f"{shape}, {spec.name}", partial(_measured, bench, shape, spec, cell))


def _measured(bench: Bench, shape: str, spec: ArmSpec, cell: Cell) -> Rows:
    model = bench.models.random(shape)
    device = model.device
    drawn = torch.randint(model.config.vocab_size, (1, cell.context), generator=torch.Generator().manual_seed(0))
    prompts = drawn.to(device)
    free_memory()
    before = _in_use(device)
    arm = make_arm(spec, model)
    absence = arm.absence(cell)
    if absence is not None:
        return {"": {"peak": Figure(cannot=absence)}}
    # So that what is made once, programs and substitutes, is there.
    arm.decode(prompts, cell, seed=0)
    stays = _in_use(device) - before
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    growth = peak_memory(lambda: arm.decode(prompts, cell, seed=0), device)
    weights = sum(weight.nbytes for weight in model.parameters())
    return {
        "": {
            "weights": Figure.number(weights / _MIB, "MiB"),
            "stays after a call": Figure.number(stays / _MIB, "MiB"),
            "peak above": Figure.number(None if growth is None else growth / _MIB, "MiB", _UNTOLD),
            **_of_the_device(device),
        }
    }


def _in_use(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes() or 0


def _of_the_device(device: torch.device) -> dict[str, Figure]:
    """What torch reserved, and all that is in use there: graphs and libraries take memory of their own."""
    if device.type != "cuda":
        return {name: Figure(cannot="a CPU has no memory of its own") for name in ("reserved", "in use")}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "reserved": Figure.number(torch.cuda.max_memory_reserved(device) / _MIB, "MiB"),
        "in use": Figure.number((total - free) / _MIB, "MiB"),
    }
