"""The output folder of a training: begun once, resumed by the same command, finished once, never overwritten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfspec.errors import TrainingError
from selfspec.files.json_text import read_json
from selfspec.files.writing import check_output_folder, write_json, write_sealed, writing
from selfspec.tools.train.course import CHECKPOINTS, KEPT
from selfspec.values import shown

REPORT = "training.json"
_BEGUN = "run.json"
_NEW = "unfinished"


@dataclass(frozen=True)
class _Begun:
    """What `run.json` says."""

    settings: dict[str, Any]
    before: dict[str, float] | None = None


class RunFolder:
    """Where a training keeps its settings, its checkpoints and, in the end, its result; made by `begin`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> None:
        """Refuse, before any work, a folder that no training could begin in or go on in."""
        check_output_folder(self.path)
        if (self.path / REPORT).exists():
            raise TrainingError(f"{self.path} holds a finished training; give another folder with --to")
        if not (self.path / _BEGUN).exists() and self.path.exists() and any(self.path.iterdir()):
            raise TrainingError(f"{self.path} is not empty and holds no training; give another folder with --to")

    def begin(self, settings: Mapping[str, Any], before: dict[str, float] | None = None) -> dict[str, float] | None:
        """Begin a training, or go on with the one that was begun here with the same settings.

        Args:
            settings: ready for JSON.
            before: figures of the model as it is before training; None: not measured yet.

        Returns:
            The figures of when it was begun, if they were measured.
        """
        self.check()
        file, wanted = self.path / _BEGUN, _Begun(json.loads(json.dumps(settings)), before)
        if not file.exists():
            write_sealed(file, asdict(wanted), KEPT)
        begun = read_json(file, _Begun, TrainingError, "give another folder with --to")
        theirs, ours = begun.settings, wanted.settings
        changed = _differing(theirs, ours)
        if changed:
            raise TrainingError(
                f"the training in {self.path} was begun with other settings ({', '.join(changed)}); repeat its "
                "command to go on with it, or give another folder with --to"
            )
        if begun.before is None and before is not None:
            write_sealed(file, asdict(wanted), KEPT)
        return begun.before or before

    def finish(self, save: Callable[[Path], None], report: Mapping[str, Any]) -> None:
        """Put the result in place, the report last, and drop the checkpoints."""
        new = self.path / _NEW
        shutil.rmtree(new, ignore_errors=True)
        try:
            with writing(self.path, KEPT):
                new.mkdir()
                save(new)
                for file in sorted(new.iterdir()):
                    file.replace(self.path / file.name)
                write_json(self.path / REPORT, report, KEPT)
        except BaseException:
            # Half a result would take the room that the next try needs.
            shutil.rmtree(new, ignore_errors=True)
            raise
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
        new.rmdir()
        (self.path / _BEGUN).unlink()


def _differing(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Settings that differ, those within settings too, each with both values."""
    found = []
    for name in sorted(theirs.keys() | ours.keys()):
        there, here = theirs.get(name), ours.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            found += _differing(there, here)
        elif there != here:
            found.append(f"{name} {shown(there)} there, {shown(here)} here")
    return found
