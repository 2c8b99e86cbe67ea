"""Runs: what is measured, each under a key, and its rows: a line a text in one file that work goes on from."""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec.errors import BenchError, SelfSpecError
from selfspec.files.json_text import parse_json
from selfspec.files.writing import CHECKSUM, check_output_file, sealed, writing
from selfspec.measure.environment import environment
from selfspec.measure.spare_cores import CoreWatch
from selfspec.measure.stock import end_tokens
from selfspec.model.identity import fingerprint

FILE = "runs.jsonl"

Row = dict[str, Any]
"""A row of the lab's table, by column: docs/columns.md says what each is."""

_KEPT = "what was measured before is kept: make room and repeat the command to go on"
# Columns by which a file is read; the row's place among those of its run, and their number.
_RUN, _MEASURED, _NUMBER, _OF = "run", "measured", "number", "of"


@dataclass(frozen=True)
class Run:
    """One thing to measure: asked for twice, it is done once.

    Attributes:
        measured: `generation`, `teacher forcing`, `text` or `costs`.
        under: all that the result depends on; columns of its rows.
        labels: columns that change no result, as the names of model and prompts.
    """

    measured: str
    under: Mapping[str, Any]
    labels: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A digest of what the result depends on."""
        written = json.dumps([self.measured, dict(self.under)], sort_keys=True)
        return hashlib.sha256(written.encode()).hexdigest()[:20]

    def rows(self, found: Sequence[Mapping[str, Any]], around: Mapping[str, Any]) -> list[Row]:
        """Return the rows of a result, measured with what `around` says.

        A BenchError: a figure is called as one of the run's own columns, and would be taken for it.
        """
        named = {_RUN: self.key, _MEASURED: self.measured, **around, **self.labels, **self.under}
        if taken := sorted({*named, _NUMBER, _OF} & {name for each in found for name in each}):
            raise BenchError(f"figures are called {', '.join(taken)}, as columns of the run are; give other names")
        return [{**named, _NUMBER: number, _OF: len(found), **each} for number, each in enumerate(found)]


class Runs:
    """The rows of a folder, by run: the latest of each. Without a folder, they are kept nowhere.

    A BenchError: its file holds something else, or the folder is another's; a StorageError: it cannot be written to.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / FILE
        self._rows: dict[str, list[Row]] = {}
        if self._file is not None and folder is not None:
            if folder.is_dir() and not self._file.exists() and any(folder.iterdir()):
                raise BenchError(f"{folder} holds other files and no {FILE}; give a new folder, or an empty one")
            if folder.exists() and not folder.is_dir():
                raise BenchError(f"{folder} is a file; give a folder")
            check_output_file(self._file)
            for number, line in enumerate(_whole_lines(self._file).splitlines(), 1):
                self._add(self._read(number, line))

    def __getitem__(self, run: Run) -> list[Row]:
        # Its model may have been called otherwise then.
        return [{**row, **run.labels} for row in self._rows[run.key]]

    def __contains__(self, run: Run) -> bool:
        """Return whether a run is there, with all its rows."""
        rows = self._rows.get(run.key, [])
        return bool(rows) and len(rows) == rows[0][_OF]

    def measured(self, kind: str) -> list[Row]:
        """Return all rows of a kind, in the order in which their runs were first made."""
        return [row for rows in self._rows.values() for row in rows if row[_MEASURED] == kind]

    def keep(self, rows: Iterable[Row]) -> None:
        """Add the rows of whole runs to the file, a line each; if it cannot be written, those before stay."""
        made = list(rows)
        if self._file is not None:
            lines = "".join(json.dumps(sealed(row)) + "\n" for row in made)
            with writing(self._file, _KEPT):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                whole = _whole_lines(self._file)
                with self._file.open("r+" if self._file.exists() else "w", encoding="utf-8", newline="") as file:
                    # A line that was cut off in the middle is no row.
                    file.truncate(len(whole.encode()))
                    file.seek(0, 2)
                    file.write(lines)
        for row in made:
            self._add(row)

    def find_out(
        self,
        runs: Sequence[Run],
        find: Callable[[Sequence[Run]], Sequence[Sequence[Mapping[str, Any]]]],
        around: Mapping[str, Any],
    ) -> None:
        """Find out what is not known of some runs, and keep it; an error is a result, and ends no other run."""
        missing = [run for run in runs if run not in self]
        if not missing:
            return
        begun, busy = time.perf_counter(), CoreWatch()
        try:
            found = find(missing)
        except Exception as error:
            if len(missing) == 1:
                self.keep(missing[0].rows([{"error": _said(error)}], around))
            for run in missing if len(missing) > 1 else ():
                self.find_out([run], find, around)
            return
        took = {"work_seconds": (time.perf_counter() - begun) / len(missing), **asdict(busy.read())}
        self.keep(row for run, each in zip(missing, found, strict=True) for row in run.rows(each, {**around, **took}))

    def _add(self, row: Row) -> None:
        if row[_NUMBER] == 0:
            self._rows[row[_RUN]] = []
        self._rows.setdefault(row[_RUN], []).append(row)

    def _read(self, number: int, line: str) -> Row:
        try:
            row = parse_json(line)
            if not isinstance(row, dict) or not all(
                isinstance(row.get(name), kind)
                for name, kind in ((_RUN, str), (_MEASURED, str), (_NUMBER, int), (_OF, int))
            ):
                raise ValueError("it has no run, number and count")
            if row != sealed(row):
                raise ValueError(f"its {CHECKSUM} does not fit: it is damaged, or was changed")
        except ValueError as wrong:
            raise BenchError(
                f"line {number} of {self._file} is no row of this version of selfspec ({wrong}); give "
                "another folder, or take the line out"
            ) from None
        del row[CHECKSUM]
        return row


def model_name(model: PreTrainedModel) -> str:
    """Return what to call a model that nobody named: its folder or checkpoint, else its class."""
    return Path(getattr(model, "name_or_path", "") or type(model).__name__).name


def digest_of(rows: Sequence[Any]) -> str:
    """Return a digest of some values, as the token ids of prompts."""
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:20]


def _whole_lines(file: Path) -> str:
    content = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    return content[: content.rfind("\n") + 1]


def _said(error: Exception) -> str:
    message = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SelfSpecError):
        return message
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{message} ({Path(last.filename).name}:{last.lineno})"


# Of a configuration: where it was read from and by what, which changes nothing. Its dtype is the model's own.
_UNSAID = {"_name_or_path", "architectures", "dtype", "transformers_version"}


def origin(model: PreTrainedModel) -> Row:
    """Identify a model as it is: columns that are a part of every key.

    `weights` is their fingerprint, shortened; `setting` a digest of it and all else: dtype, configuration, end tokens,
    device, threads, versions, kernels. A model with offloaded weights, which cannot be told from others, is a
    BenchError.
    """
    try:
        weights = fingerprint(model, torch.float32)
    except ValueError as reason:
        raise BenchError(f"figures belong to weights, and {reason}: load the model whole") from reason

    def without_names(config: Row) -> Row:
        return {name: value for name, value in config.items() if name not in _UNSAID}

    setting = [
        weights,
        str(model.dtype),
        json.loads(model.config.to_json_string(use_diff=False), object_hook=without_names),
        model.config._attn_implementation,
        sorted(end_tokens(model)),
        environment(model.device),
    ]
    digest = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:20]
    return {"weights": weights[:20], "setting": digest, "dtype": str(model.dtype).removeprefix("torch.")}
