"""Results of the cases of a stage, saved as each ends, so that a stage that was killed goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from device.figure import Figure

from selfspec.errors import StorageError
from selfspec.files.json_text import read_json
from selfspec.files.writing import write_json
from selfspec.measure.environment import environment

_PARTIAL = ".partial.json"
_REMEDY = "remove it, or name another folder with --to"


@dataclass(frozen=True)
class Settings:
    """Conditions that the cases of one table share.

    Attributes:
        device: as on the command line.
        miniature: whether models were as small as can be.
        model: what was widened.
        dtype: what models computed in.
    """

    device: str
    miniature: bool
    model: str
    dtype: str


@dataclass(frozen=True)
class CaseRecord:
    """Record of a case.

    Attributes:
        seconds: that it took.
        environment: versions and machine.
        rows: its figures.
        reason: why there are none, as a figure; None: there are some.
    """

    seconds: float
    environment: dict[str, Any]
    rows: dict[str, dict[str, Figure]] = field(default_factory=dict)
    reason: Figure | None = None

    @property
    def all_figures(self) -> list[Figure]:
        """All figures of the case, reasons included."""
        own = [] if self.reason is None else [self.reason]
        return [*own, *(figure for row in self.rows.values() for figure in row.values())]

    @property
    def failed(self) -> bool:
        """True if something should have been measured and was not."""
        return any(figure.failed is not None for figure in self.all_figures)


@dataclass
class StageRecord:
    """Record of a stage.

    Attributes:
        stage: its name.
        settings: of all its cases.
        cases: by name, in the order in which they ended.
        begun: how often each case was begun.
    """

    stage: str
    settings: Settings
    cases: dict[str, CaseRecord] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)


class StageFile:
    """Where the results of a stage are kept: `STAGE.partial.json` until it is complete, then `STAGE.json`.

    Args:
        folder: of all stages.
        stage: its name.
    """

    def __init__(self, folder: Path, stage: str) -> None:
        self._stage = stage
        self._complete = folder / f"{stage}.json"
        self._partial = folder / f"{stage}{_PARTIAL}"

    @property
    def is_complete(self) -> bool:
        """True if nothing is left to do."""
        return self._complete.exists()

    def read(self, settings: Settings) -> StageRecord:
        """What is there already; nothing, where there is no file.

        Raises:
            StorageError: the file is unreadable, or was made with other settings.
        """
        file = self._complete if self.is_complete else self._partial
        if not file.exists():
            return StageRecord(self._stage, settings)
        record = read_json(file, StageRecord, StorageError, _REMEDY)
        if record.settings != settings:
            raise StorageError(f"{file} was made with {record.settings}, not {settings}; {_REMEDY}")
        return record

    def save(self, record: StageRecord, *, complete: bool = False) -> None:
        """Write what there is, whole or not at all.

        Raises:
            StorageError: it cannot be written.
        """
        write_json(self._complete if complete else self._partial, asdict(record))
        if complete:
            self._partial.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove what is there."""
        self._complete.unlink(missing_ok=True)
        self._partial.unlink(missing_ok=True)


def read_all(folder: Path, names: list[str]) -> Mapping[str, StageRecord]:
    """Return the stages that have results, complete or not, by name in the order given.

    Raises:
        StorageError: a file is unreadable.
    """
    found: dict[str, StageRecord] = {}
    for name in names:
        for file in (folder / f"{name}.json", folder / f"{name}{_PARTIAL}"):
            if file.exists():
                found.setdefault(name, read_json(file, StageRecord, StorageError, _REMEDY))
    return found


def surroundings(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Versions of what runs, and what it runs on."""
    found: dict[str, Any] = {**environment(device), "dtype": str(dtype).removeprefix("torch.")}
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        found |= {"cuda": torch.version.cuda, "driver": _driver(), "device_memory": memory}
    return found


def _driver() -> str | None:
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return said[0] if said else None
