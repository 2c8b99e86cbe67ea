"""Run the benchmark over many cells, interrupted and resumed at will."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.measure.environment import environment
from selfspec.measure.expected_time import Watch
from selfspec.measure.spare_cores import CoreWatch
from selfspec.tools.lab.arms import ArmSpec, Cell, Prompts, make_arm
from selfspec.tools.lab.drafts import Given
from selfspec.tools.lab.measured import MeasuredCell
from selfspec.tools.lab.pass_costs import costs_of, measure_memory
from selfspec.tools.lab.record import Record, Setup, nats_of
from selfspec.tools.lab.runs import Asked, Origin, Runs
from selfspec.tools.lab.turns import ArmRun, measure

Part = Literal["speed", "memory", "costs", "quality", "acceptance"]
"""Parts of a measurement. Without `speed` and what needs it, texts are decoded once and nothing is timed."""

_TIMED: frozenset[Part] = frozenset({"speed", "memory", "costs"})


@dataclass(frozen=True, kw_only=True)
class Session:
    """Measures one model in each cell; the arms begin with `model.generate`.

    Attributes:
        place: folder or hub name where another process can load it; None: nowhere, and memory is not measured.
        warm_up: how often each arm decodes all prompts before it is timed.
        parts: to measure. Of `memory`, which takes a separate process for each arm, one cell for each batch size and
            prompt length.
        given: drafters and rules that are objects, which no other process has.
        tokenizer: writes prompts and texts down; None: token ids alone are kept.
    """

    name: str
    place: str | None
    model: PreTrainedModel
    specs: Sequence[ArmSpec]
    repeats: int = 5
    warm_up: int = 3
    parts: frozenset[Part] = _TIMED
    given: Given = field(default_factory=Given)
    tokenizer: PreTrainedTokenizerBase | None = None

    def measure(self, cells: Mapping[Cell, Sequence[Prompts]], runs: Runs, watch: Watch) -> list[MeasuredCell]:
        """Measure the cells, given with the prompts of each call, that were not measured before; return all of them."""
        arms = [make_arm(spec, self.model, self.given) for spec in self.specs]
        specs = [arm.spec for arm in arms]
        origin = Origin.of(self.model)
        setups = {cell: self._setup(prompts, origin) for cell, prompts in cells.items()}
        found = {}
        for cell, setup in setups.items():
            asked = MeasuredCell.question(cell, setup)
            if asked in runs and {*specs} <= {record.arm for record in MeasuredCell.of(runs[asked]).arms}:
                found[cell] = MeasuredCell.of(runs[asked])
        missing = [cell for cell in cells if cell not in found]
        # What is timed is timed in turns; what is counted depends on no other arm.
        kept = {cell: self._counted(MeasuredCell.question(cell, setups[cell]), runs, specs) for cell in missing}
        # Of cells of one shape the first.
        shapes = {(cell.batch, cell.context): cell for cell in reversed(list(cells))}
        weighed = list(shapes.values()) if "memory" in self.parts and self.place is not None else []
        watch.begin(
            sum(
                len({*specs} - kept[cell].keys()) * (len(cells[cell]) * self._times + (cell in weighed))
                for cell in missing
            )
        )
        for number, cell in enumerate(missing, 1):
            tick = partial(watch.step, f"cell {number} of {len(missing)}: {cell.title}")
            busy, prompts = CoreWatch(), cells[cell]
            # Where nothing is timed each text is decoded once.
            repeats, warm_up = (self.repeats, self.warm_up) if self._timed else (1, 0)
            records = dict(kept[cell])
            going = [arm for arm in arms if arm.spec not in records]
            results = measure(self.model, cell, going, prompts, repeats, warm_up, tick)
            load = busy.read()
            costs = costs_of(self.model, cell, going, prompts) if "costs" in self.parts else [None] * len(going)
            for result, cost in zip(results, costs, strict=True):
                memory = None
                if cell in weighed and self.place is not None and result.absence is None:
                    tick()
                    memory = measure_memory(result.arm.spec, cell, prompts[0], self.place, self.model.dtype)
                nats = self._nats(result, cell, prompts)
                said = [self._said(call.rows for call in calls) for calls in result.calls] if self.tokenizer else []
                records[result.arm.spec] = Record.of(result, memory, cost, nats, said)
            around, texts = environment(self.model.device), self._said(call.rows for call in prompts)
            in_order = tuple(records[spec] for spec in dict.fromkeys([*specs, *records]))
            found[cell] = MeasuredCell(cell, setups[cell], in_order, around, load, texts)
            runs.keep([found[cell].run])
        return [found[cell] for cell in cells]

    def _counted(self, asked: Asked, runs: Runs, specs: Sequence[ArmSpec]) -> dict[ArmSpec, Record]:
        """Return the arms of a cell that were counted before; none where they are timed."""
        if self._timed or asked not in runs:
            return {}
        # A draft that has changed takes the place of what it was.
        anew = {replace(spec, content="") for spec in specs} - {*specs}
        before = MeasuredCell.of(runs[asked]).arms
        return {each.arm: each for each in before if each.arm in specs or replace(each.arm, content="") not in anew}

    @property
    def _timed(self) -> bool:
        return bool(self.parts & _TIMED)

    @property
    def _times(self) -> int:
        return self.warm_up + self.repeats if self._timed else 1

    def _said(self, calls: Iterable[Sequence[Sequence[int]]]) -> list[list[str]]:
        """Write down the rows of each call."""
        if self.tokenizer is None:
            return []
        return [[str(self.tokenizer.decode(row)) for row in rows] for rows in calls]

    def _nats(self, result: ArmRun, cell: Cell, prompts: Sequence[Prompts]) -> list[list[list[float]]]:
        if "quality" not in self.parts:
            return []
        # Greedily every repeat says the same.
        repeats = result.calls if cell.sampled else result.calls[:1]
        return [nats_of(self.model, prompts, [call.rows for call in calls]) for calls in repeats]

    def _setup(self, prompts: Sequence[Prompts], origin: Origin) -> Setup:
        rows = [call.rows for call in prompts]
        return Setup(
            model=self.name,
            **asdict(origin),
            parameters=self.model.num_parameters(),
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=self.model.device.type,
            threads=torch.get_num_threads(),
            repeats=self.repeats if self._timed else 0,
            prompts=sum(map(len, rows)),
            prompts_digest=hashlib.sha256(str(rows).encode()).hexdigest()[:12],
            parts=tuple(sorted(self.parts)),
        )
