"""A run of the benchmark over many cells, which can be interrupted and resumed."""

from __future__ import annotations

import copy
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.environment import environment
from selfspec.measure.progress import Watch
from selfspec.runtime.packed import pack
from selfspec.tools.bench.arms import ArmSpec, make_arm
from selfspec.tools.bench.candidates import candidates_of
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.costs import costs_of
from selfspec.tools.bench.measure import measure
from selfspec.tools.bench.memory import measure_memory
from selfspec.tools.bench.record import Setup, record_of
from selfspec.tools.bench.results import MeasuredCell, ResultsFile


@dataclass(frozen=True, kw_only=True)
class Session:
    """What is measured of one model in each cell.

    Attributes:
        name: what reports call the model.
        place: folder or hub name where another process can load it; None: nowhere, and memory is not measured.
        specs: the arms, `model.generate` first.
        warm_up: how often it decodes all prompts before.
        peaks: whether peak memory is measured, each arm in a separate process, once for each batch size and prompt
            length.
        costs: whether the parts of a round are timed apart, too.
    """

    name: str
    place: str | None
    model: PreTrainedModel
    specs: Sequence[ArmSpec]
    repeats: int = 5
    warm_up: int = 3
    peaks: bool = True
    costs: bool = True

    def measure(self, cells: Mapping[Cell, Sequence[Tensor]], file: ResultsFile, watch: Watch) -> list[MeasuredCell]:
        """Measure what was not measured before.

        Prompts of a cell are `[batch, context]`, one for each call; the file gets each cell's results when it is done.

        Returns:
            All of the cells, measured now or before.
        """
        model, run, around = self.model, uuid.uuid4().hex[:12], environment(self.model.device)
        own_model = model
        if any(spec.packed for spec in self.specs):
            # What it is compared with runs plain weights.
            own_model = copy.deepcopy(model)
            pack(own_model)
        arms = [make_arm(spec, own_model if spec.packed else model) for spec in self.specs]
        setups = {cell: self._setup(prompts) for cell, prompts in cells.items()}
        found = {
            (each.cell, each.settings): each
            for each in file.cells()
            if {*self.specs} <= {record.arm for record in each.arms}
        }
        missing = [cell for cell in cells if (cell, setups[cell]) not in found]
        # Of cells of one shape the first.
        shapes = {(cell.batch, cell.context): cell for cell in reversed(list(cells))}
        weighed = list(shapes.values()) if self.peaks and self.place is not None else []
        calls = sum(len(cells[cell]) * (self.warm_up + self.repeats) + (cell in weighed) for cell in missing)
        watch.begin(len(arms) * calls)
        for number, cell in enumerate(missing, 1):
            tick = partial(watch.step, f"cell {number} of {len(missing)}: {cell.title}")
            prompts, setup = cells[cell], setups[cell]
            results = measure(model, cell, arms, prompts, self.repeats, self.warm_up, tick)
            costs = costs_of(own_model, cell, arms) if self.costs else [None] * len(arms)
            records = []
            for result, cost in zip(results, costs, strict=True):
                memory = None
                if cell in weighed and self.place is not None and result.absence is None:
                    tick()
                    memory = measure_memory(result.arm.spec, cell, prompts[0], self.place, model.dtype)
                several = candidates_of(own_model, cell, result, prompts) if self.costs else []
                records.append(record_of(result, run, cell, setup, around, memory, cost, several))
            file.add(records)
            found[cell, setup] = MeasuredCell(cell, setup, tuple(records))
        return [found[cell, setups[cell]] for cell in cells]

    def _setup(self, prompts: Sequence[Tensor]) -> Setup:
        digest = hashlib.sha256(str([batch.tolist() for batch in prompts]).encode()).hexdigest()
        return Setup(
            model=self.name,
            parameters=self.model.num_parameters(),
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=self.model.device.type,
            threads=torch.get_num_threads(),
            repeats=self.repeats,
            prompts=sum(len(batch) for batch in prompts),
            prompts_digest=digest[:12],
        )
