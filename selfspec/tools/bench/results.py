"""The results of cells, and their file: a line of JSON for each arm, added to cell by cell, so that a run can go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from selfspec.errors import BenchError
from selfspec.files.json_text import first_error
from selfspec.files.writing import check_output_file, whole
from selfspec.tools.bench.arms import ArmKind, ArmSpec
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.figures import Figures, figures
from selfspec.tools.bench.record import Record, Setup

FILE = "results.jsonl"

_RECORD = TypeAdapter(Record)


@dataclass(frozen=True)
class MeasuredCell:
    """All arms of a cell, in the order of the report, measured in turns in one run."""

    cell: Cell
    settings: Setup
    arms: tuple[Record, ...]

    def scored(self, kind: ArmKind) -> Record | None:
        """The first arm of a kind, if it is scored."""
        return next((record for record in self.arms if record.arm.kind == kind and record.scored), None)

    @cached_property
    def figures(self) -> dict[ArmSpec, Figures]:
        """Those of the arms that are scored."""
        others = self.scored("generate"), self.scored("plain")
        return {record.arm: figures(record, *others) for record in self.arms if record.scored}

    def to_dict(self) -> dict[str, Any]:
        """The figures, ready for JSON."""
        arms = []
        for record in self.arms:
            raw, found = record.to_dict(), self.figures.get(record.arm)
            known = {name: raw[name] for name in ("arm", "absence", "agreement", "memory")}
            arms.append({"name": record.arm.name, **known, **({} if found is None else asdict(found))})
        about = {"cell": asdict(self.cell), "settings": asdict(self.settings)}
        return {**about, "environment": self.arms[0].environment, "arms": arms}


class ResultsFile:
    """The results in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / FILE

    def add(self, records: Sequence[Record]) -> None:
        """Write the lines of a cell, all at once."""
        lines = "".join(json.dumps(record.to_dict(), allow_nan=False) + "\n" for record in records)
        with whole(self._file, "cells measured before are kept: make room and repeat the command to go on") as draft:
            draft.write_text(self._whole_lines() + lines, encoding="utf-8")

    def check(self) -> None:
        """Refuse, before any work, results that cannot be continued or written to."""
        check_output_file(self._file)
        self.cells()

    def cells(self) -> list[MeasuredCell]:
        """The cells measured so far, each as its latest run did, in the order in which they were first measured."""
        runs: dict[tuple[Cell, Setup], dict[str, list[Record]]] = {}
        for number, line in enumerate(self._whole_lines().split("\n"), 1):
            if line:
                record = self._record(number, line)
                runs.setdefault((record.cell, record.settings), {}).setdefault(record.run, []).append(record)
        return [MeasuredCell(*conditions, tuple([*by_run.values()][-1])) for conditions, by_run in runs.items()]

    def _whole_lines(self) -> str:
        """All lines but one that was cut off in the middle, which is no result."""
        if not self._file.exists():
            return ""
        content = self._file.read_text(encoding="utf-8")
        return content[: content.rfind("\n") + 1]

    def _record(self, number: int, line: str) -> Record:
        try:
            return _RECORD.validate_json(line, strict=True)
        except ValidationError as wrong:
            raise BenchError(
                f"line {number} of {self._file} is no result of this version of selfspec bench ({first_error(wrong)}); "
                "give another folder, or take the line out"
            ) from None
