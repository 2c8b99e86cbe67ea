"""The file of results: a line of JSON for each cell and arm, added to cell by cell, so that a run can go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfspec.errors import BenchError
from selfspec.files.json_text import parse_json
from selfspec.files.writing import check_output_file, writing
from selfspec.tools.bench.arm import ArmSpec
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.record import Record, Setup

FILE = "results.jsonl"


@dataclass(frozen=True)
class MeasuredCell:
    """All arms of a cell, measured in turns in one run.

    Attributes:
        cell: the conditions.
        settings: the rest of them.
        arms: in the order of the report.
    """

    cell: Cell
    settings: Setup
    arms: tuple[Record, ...]

    def covers(self, arms: Sequence[ArmSpec]) -> bool:
        """Whether these arms are among those measured."""
        return set(arms) <= {record.arm for record in self.arms}


class ResultsFile:
    """The results in a folder.

    Args:
        folder: made when the first result is written.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE

    def add(self, records: Sequence[Record]) -> None:
        """Write the lines of a cell, all at once.

        Raises:
            StorageError: they cannot be written; those of other cells are kept.
        """
        lines = "".join(json.dumps(record.to_dict(), allow_nan=False) + "\n" for record in records)
        kept = self._whole_lines()
        with writing(self._file, "cells measured before are kept: make room and repeat the command to go on"):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("r+b" if self._file.exists() else "wb") as file:
                file.truncate(len(kept.encode()))
                file.seek(0, 2)
                file.write(lines.encode())

    def check(self) -> None:
        """Refuse, before any work, results that cannot be continued or written to.

        Raises:
            BenchError: a line cannot be read.
            StorageError: file or folder cannot be written.
        """
        check_output_file(self._file)
        self.cells()

    def find(self, cell: Cell, settings: Setup, arms: Sequence[ArmSpec]) -> MeasuredCell | None:
        """An earlier measurement of the cell under the same settings, with all of these arms."""
        for measured in self.cells():
            if (measured.cell, measured.settings) == (cell, settings) and measured.covers(arms):
                return measured
        return None

    def cells(self) -> list[MeasuredCell]:
        """The cells measured so far, each as its latest run did, in the order in which they were first measured.

        Raises:
            BenchError: a line cannot be read.
        """
        runs: dict[tuple[Cell, Setup], dict[str, list[Record]]] = {}
        for record in self._records():
            runs.setdefault((record.cell, record.settings), {}).setdefault(record.run, []).append(record)
        return [
            MeasuredCell(cell, settings, tuple(list(by_run.values())[-1])) for (cell, settings), by_run in runs.items()
        ]

    def _records(self) -> list[Record]:
        lines = self._whole_lines().split("\n")
        return [self._record(number, line) for number, line in enumerate(lines, 1) if line]

    def _whole_lines(self) -> str:
        """All lines but one that was cut off in the middle, which is no result."""
        if not self._file.exists():
            return ""
        content = self._file.read_text(encoding="utf-8")
        return content[: content.rfind("\n") + 1]

    def _record(self, number: int, line: str) -> Record:
        try:
            return Record.from_dict(parse_json(line))
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(
                f"line {number} of {self._file} is no result of this version of selfspec bench "
                f"({type(error).__name__}: {error}); give another folder, or take the line out"
            ) from error
