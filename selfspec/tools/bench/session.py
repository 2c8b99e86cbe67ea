"""A run of the benchmark over many cells, which can be interrupted and gone on with."""

from __future__ import annotations

import copy
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.environment import environment
from selfspec.kernels.packed import pack
from selfspec.tools.bench.arm import Arm, ArmSpec
from selfspec.tools.bench.arms import make_arm
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.costs import PassCosts, costs_of
from selfspec.tools.bench.measure import measure, runs
from selfspec.tools.bench.memory import Memory, measure_memory
from selfspec.tools.bench.record import Setup, record_of
from selfspec.tools.bench.results_file import MeasuredCell, ResultsFile


@dataclass(frozen=True)
class BenchedModel:
    """What is measured.

    Attributes:
        name: what reports call it.
        folder: where another process can load it; None: nowhere, and memory is not measured.
        model: on its device.
    """

    name: str
    folder: str | None
    model: PreTrainedModel


@dataclass(frozen=True)
class BenchPlan:
    """What is measured in each cell.

    Attributes:
        repeats: how often each arm is timed.
        warm_up: how often it decodes all prompts before.
        memory: whether peak memory is measured, each arm in a process of its own, once for each batch size and prompt
            length.
        costs: whether the parts of a round are timed apart, too.
    """

    repeats: int = 5
    warm_up: int = 3
    memory: bool = True
    costs: bool = True


class Watcher(Protocol):
    """Is told how far a session is."""

    def begin(self, cell: Cell, steps: int) -> None:
        """A cell begins that takes so many steps at most; 0: it was measured before."""

    def step(self) -> None:
        """A step is done."""


class Session:
    """Measures cells of one model with the same arms.

    Args:
        subject: the model.
        specs: the arms, `model.generate` first.
        plan: what is measured in each cell.
        file: gets the results of each cell when it is done.

    Raises:
        SelfSpecError: an arm does not fit the model.
    """

    def __init__(self, subject: BenchedModel, specs: Sequence[ArmSpec], plan: BenchPlan, file: ResultsFile) -> None:
        self._subject = subject
        self._specs = list(specs)
        self._own_model = _packed(subject.model) if any(spec.packed for spec in specs) else subject.model
        self._arms: list[Arm] = [make_arm(spec, self._own_model if spec.packed else subject.model) for spec in specs]
        self._plan = plan
        self._file = file
        self._run = uuid.uuid4().hex[:12]
        self._environment = environment(subject.model.device)

    def measure(self, cells: Mapping[Cell, Sequence[Tensor]], watcher: Watcher) -> list[MeasuredCell]:
        """Measure what was not measured before.

        Args:
            cells: their prompts, `[batch, context]` for each call.
            watcher: is told how far it is.

        Returns:
            All of the cells, measured now or before.
        """
        measured = []
        weighed: set[tuple[int, int]] = set()
        for cell, prompts in cells.items():
            settings = self._settings(prompts)
            found = self._file.find(cell, settings, self._specs)
            fresh = (cell.batch, cell.context) not in weighed
            weighed.add((cell.batch, cell.context))
            if found is not None:
                watcher.begin(cell, 0)
                measured.append(found)
                continue
            weighing = self._plan.memory and self._subject.folder is not None and fresh
            calls = runs(len(self._arms), len(prompts), self._plan.repeats, self._plan.warm_up)
            watcher.begin(cell, calls + weighing * len(self._arms))
            measured.append(self._cell(cell, settings, prompts, weighing, watcher))
        return measured

    def _cell(
        self, cell: Cell, settings: Setup, prompts: Sequence[Tensor], weighing: bool, watcher: Watcher
    ) -> MeasuredCell:
        plan = self._plan
        results = measure(self._subject.model, cell, self._arms, prompts, plan.repeats, plan.warm_up, watcher.step)
        costs = self._timed(cell)
        records = []
        for result, cost in zip(results, costs, strict=True):
            memory = None
            if weighing:
                memory = None if result.absence else self._weighed(result.arm.spec, cell, prompts[0])
                watcher.step()
            records.append(record_of(result, self._run, cell, settings, self._environment, memory, cost))
        self._file.add(records)
        return MeasuredCell(cell, settings, tuple(records))

    def _timed(self, cell: Cell) -> list[PassCosts | None]:
        return costs_of(self._own_model, cell, self._arms) if self._plan.costs else [None] * len(self._arms)

    def _weighed(self, spec: ArmSpec, cell: Cell, prompts: Tensor) -> Memory | None:
        model = self._subject.model
        assert self._subject.folder is not None
        return measure_memory(
            spec,
            cell,
            prompts.tolist(),
            self._subject.folder,
            _dtype(model),
            str(model.device),
            torch.get_num_threads(),
        )

    def _settings(self, prompts: Sequence[Tensor]) -> Setup:
        model = self._subject.model
        digest = hashlib.sha256(str([batch.tolist() for batch in prompts]).encode()).hexdigest()
        return Setup(
            model=self._subject.name,
            parameters=model.num_parameters(),
            dtype=_dtype(model),
            device=model.device.type,
            threads=torch.get_num_threads(),
            repeats=self._plan.repeats,
            prompts=sum(len(batch) for batch in prompts),
            prompts_digest=digest[:12],
        )


def _packed(model: PreTrainedModel) -> PreTrainedModel:
    """A packed copy: what it is compared with runs plain weights."""
    packed = copy.deepcopy(model)
    pack(packed)
    return packed


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
