"""The output folder of a training: begun once, gone on with by the same command, finished once, never overwritten."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from selfspec.errors import TrainingError
from selfspec.train.course import CHECKPOINTS

REPORT = "training.json"
_BEGUN = "run.json"
_NEW = "unfinished"


class RunFolder:
    """Where a training keeps its settings, its checkpoints and, in the end, its result.

    Args:
        path: the folder; it is made by `begin`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Begin a training, or go on with the one that was begun here with the same settings.

        Raises:
            TrainingError: the folder holds a finished training, one with other settings, or something else.
        """
        wanted = json.loads(json.dumps(settings))
        if (self.path / REPORT).exists():
            raise TrainingError(f"{self.path} holds a finished training; give another folder with --to")
        if (self.path / _BEGUN).exists():
            begun = self._read()["settings"]
            changed = sorted(name for name in begun.keys() | wanted.keys() if begun.get(name) != wanted.get(name))
            if changed:
                raise TrainingError(
                    f"the training in {self.path} was begun with other settings ({', '.join(changed)}); repeat its "
                    "command to go on with it, or give another folder with --to"
                )
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise TrainingError(f"{self.path} is not empty and holds no training; give another folder with --to")
        self.path.mkdir(parents=True, exist_ok=True)
        self._write({"settings": wanted})

    @property
    def before(self) -> dict[str, float] | None:
        """Figures of the model as it was before training, if they were measured already."""
        before: dict[str, float] | None = self._read().get("before")
        return before

    def keep_before(self, figures: Mapping[str, float]) -> None:
        """Keep the figures of the model as it was before training."""
        self._write({**self._read(), "before": dict(figures)})

    def finish(self, save: Callable[[Path], None], report: Mapping[str, Any]) -> None:
        """Put the result in place, the report last, and drop the checkpoints.

        Args:
            save: writes all other files into the folder it is given.
            report: what `training.json` says.
        """
        new = self.path / _NEW
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        save(new)
        for file in sorted(new.iterdir()):
            os.replace(file, self.path / file.name)
        _write_whole(self.path / REPORT, report)
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
        new.rmdir()
        (self.path / _BEGUN).unlink()

    def _read(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.path / _BEGUN).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TrainingError(f"{self.path / _BEGUN} cannot be read ({error}); give another folder") from error
        return content

    def _write(self, content: Mapping[str, Any]) -> None:
        _write_whole(self.path / _BEGUN, content)


def _write_whole(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader, or a crash, sees the old file or the new one and nothing between."""
    draft = file.with_name(f"{file.name}.part")
    draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, file)
