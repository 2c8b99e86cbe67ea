"""A cell with all its arms, as a run of the lab and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter, ValidationError

from selfspec.errors import BenchError
from selfspec.files.json_text import first_error
from selfspec.measure.spare_cores import SpareCores
from selfspec.tools.lab.arms import ArmKind, ArmSpec
from selfspec.tools.lab.cell import Cell
from selfspec.tools.lab.figures import Figures, doubts, figures, untimed_figures
from selfspec.tools.lab.origin import told_apart
from selfspec.tools.lab.quality import TextQuality, differing, qualities
from selfspec.tools.lab.record import Record, Setup
from selfspec.tools.lab.runs import Asked, Run

KIND = "cell"


@dataclass(frozen=True)
class MeasuredCell:
    """All arms of a cell, in the order of the report, measured in turns.

    Attributes:
        environment: with what.
        load: cores that were free meanwhile; this process's own count as free.
        asked: the prompts of each call, written down; empty where there was no tokenizer.
    """

    cell: Cell
    settings: Setup
    arms: tuple[Record, ...]
    environment: Mapping[str, str | bool | int | None]
    load: SpareCores
    asked: list[list[str]] = field(default_factory=list)

    @classmethod
    def of(cls, run: Run) -> MeasuredCell:
        """Return the cell that a run is of.

        Raises:
            BenchError: it is none of this version.
        """
        load = asdict(run.load or SpareCores(0, None))
        content = {**run.asked.under, **run.found, "environment": run.environment, "load": load}
        try:
            return _MEASURED.validate_json(json.dumps(content), strict=True)
        except ValidationError as wrong:
            raise BenchError(
                f"a cell of these runs is no result of this version of selfspec bench ({first_error(wrong)}); give "
                "another folder"
            ) from None

    @classmethod
    def question(cls, cell: Cell, settings: Setup) -> Asked:
        """Return what is to be found out of a cell."""
        return Asked(KIND, {"cell": asdict(cell), "settings": asdict(settings)}, {"title": cell.title})

    @property
    def run(self) -> Run:
        """The run to be kept."""
        arms = [asdict(record) for record in self.arms]
        found = {"arms": arms, "asked": self.asked}
        return Run(self.question(self.cell, self.settings), found, environment=self.environment, load=self.load)

    @property
    def timed(self) -> bool:
        """Whether calls were timed in turns."""
        return self.settings.repeats > 0

    def scored(self, kind: ArmKind) -> Record | None:
        """The first arm of a kind, if it is scored."""
        return next((record for record in self.arms if record.arm.kind == kind and record.scored), None)

    @cached_property
    def figures(self) -> dict[ArmSpec, Figures]:
        """Those of the arms that are scored."""
        scored = [record for record in self.arms if record.scored]
        if not self.timed:
            return {record.arm: untimed_figures(record) for record in scored}
        others = self.scored("generate"), self.scored("plain")
        return {record.arm: figures(record, *others) for record in scored}

    @cached_property
    def qualities(self) -> dict[ArmSpec, TextQuality]:
        """Those of the arms whose texts were scored."""
        return qualities([record for record in self.arms if record.absence is None])

    @cached_property
    def doubts(self) -> list[str]:
        """What figures cannot be, or were made beside other work; a sentence each."""
        plain = self.scored("plain")
        beside = None if plain is None else self.figures[plain.arm]
        found = [
            said
            for record in self.arms
            if record.arm in self.figures
            for said in doubts(record, self.figures[record.arm], beside)
        ]
        alike = [
            record.arm.name
            for record in self.arms
            if record.arm.kind == "draft" and record.arm in self.figures and self._has_no_width(record.arm)
        ]
        if alike:
            found.append(
                f"all prompts had as many tokens a pass ({'; '.join(alike)}), so there the interval has no width; give "
                "more prompts"
            )
        if self.timed and self.settings.device == "cpu" and (busy := self.load.doubt(self.settings.threads)):
            found.append(busy)
        return found

    def _has_no_width(self, arm: ArmSpec) -> bool:
        found = self.figures[arm].mean_accepted_length
        return found.low == found.high

    def to_dict(self) -> dict[str, Any]:
        """The figures, ready for JSON; texts and times of each call are in the file of runs."""
        far, arms = differing(self.qualities), []
        for record in self.arms:
            found, quality = self.figures.get(record.arm), self.qualities.get(record.arm)
            agreement = record.agreement and {**asdict(record.agreement), "refused": record.refused}
            arms.append(
                {
                    "name": record.arm.name,
                    "arm": asdict(record.arm),
                    "absence": record.absence,
                    "agreement": agreement,
                    "memory": record.memory and asdict(record.memory),
                    "quality": quality and {**asdict(quality), "differs": record.arm in far},
                    **({} if found is None else asdict(found)),
                }
            )
        return {
            "cell": asdict(self.cell),
            "settings": asdict(self.settings),
            "environment": dict(self.environment),
            "load": asdict(self.load),
            "doubts": self.doubts,
            "arms": arms,
        }


def titles(measured: Sequence[MeasuredCell]) -> list[str]:
    """Return titles of cells that say how they differ, in a few words; of a single one its workload and decoding."""
    # Workloads that one option makes begin alike.
    workloads = [each.cell.workload for each in measured]
    begun = {name.partition("/")[0] for name in workloads}
    alike = f"{begun.pop()}/" if len(begun) == 1 and all("/" in name for name in workloads) else ""
    models = told_apart((each.settings.model, each.settings.base) for each in measured)
    around = dict.fromkeys(name for each in measured for name in each.environment)
    parts = [
        (
            each.cell.workload.removeprefix(alike),
            f"T {each.cell.temperature:g}" if each.cell.sampled else "greedy",
            f"batch {each.cell.batch}",
            "whole prompts" if each.cell.context is None else f"{each.cell.context} of prompt",
            f"{each.cell.max_new_tokens} new",
            "chat" if each.cell.chat else "text",
            models[each.settings.model, each.settings.base],
            each.settings.dtype,
            f"{each.settings.repeats} repeats",
            f"prompts {each.settings.prompts_digest[:6]}",
            *(f"{name} {each.environment.get(name)}" for name in around),
        )
        for each in measured
    ]
    differing = [place for place, values in enumerate(zip(*parts, strict=True)) if len({*values}) > 1] or [0, 1]
    shown = [", ".join(part[place] for place in differing) for part in parts]
    if len({*shown}) == len(shown):
        return shown
    # What tells them apart has no words, as a configuration.
    return [f"{title}, {each.settings.setting[:6]}" for title, each in zip(shown, measured, strict=True)]


_MEASURED = TypeAdapter(MeasuredCell)
