"""Runs: what was measured, each with all that it was measured under, in one file that work goes on from."""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec.errors import BenchError, SelfSpecError
from selfspec.files.json_text import parsed
from selfspec.files.writing import sealed, writing
from selfspec.measure.environment import environment
from selfspec.measure.spare_cores import CoreWatch, SpareCores
from selfspec.measure.stock import end_tokens
from selfspec.model.identity import fingerprint
from selfspec.tools.lab.outputs import check_output_file

FILE = "runs.jsonl"

_KEPT = "what was measured before is kept: make room and repeat the command to go on"


@dataclass(frozen=True)
class Asked:
    """A question of some kind to the lab; the result depends on `under`.

    `place` has names of its model, text and so on in reports; they do not change the result.
    """

    kind: str
    under: Mapping[str, Any]
    place: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Tell it apart from all else: asked for twice, it is done once."""
        written = json.dumps([self.kind, dict(self.under)], sort_keys=True)
        return hashlib.sha256(written.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Run:
    """A question and its result: findings, or an error; `load` are the cores that were free, None if not watched."""

    asked: Asked
    found: Mapping[str, Any]
    error: str | None = None
    seconds: float = 0.0
    environment: Mapping[str, Any] = field(default_factory=dict)
    load: SpareCores | None = None

    @property
    def doubt(self) -> str | None:
        """Reason why its times are unsure; None: they are not, as far as is known."""
        if self.load is None or self.environment.get("device") != "cpu":
            return None
        return self.load.doubt(int(self.environment["threads"]))


class Runs:
    """The runs of a folder, by key: the latest answer to each question. Without a folder, they are kept nowhere.

    Raises:
        BenchError: its file holds something else.
        StorageError: it cannot be written to.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / FILE
        self._runs: dict[str, Run] = {}
        self._used: dict[str, Asked] = {}
        if self._file is not None:
            check_output_file(self._file)
            for number, line in enumerate(_whole_lines(self._file).splitlines(), 1):
                run = self._read(number, line)
                self._runs[run.asked.key] = run

    def __getitem__(self, asked: Asked) -> Run:
        self._used[asked.key] = asked
        # Its model may have been called otherwise then.
        return replace(self._runs[asked.key], asked=asked)

    def __contains__(self, asked: Asked) -> bool:
        return asked.key in self._runs

    @property
    def used(self) -> list[Run]:
        """Runs that were read here, in that order; others of the folder may be of other models."""
        return [self[asked] for asked in self._used.values()]

    def of_kind(self, kind: str) -> list[Run]:
        """Return the runs of a kind, in the order in which they were first made."""
        return [run for run in self._runs.values() if run.asked.kind == kind]

    def keep(self, runs: Iterable[Run]) -> None:
        """Add runs to the file, a line each; if it cannot be written, the runs before stay whole."""
        made = list(runs)
        if self._file is not None:
            lines = "".join(json.dumps(sealed(asdict(run))) + "\n" for run in made)
            with writing(self._file, _KEPT):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                whole = _whole_lines(self._file)
                with self._file.open("r+" if self._file.exists() else "w", encoding="utf-8", newline="") as file:
                    # A line that was cut off in the middle is no run.
                    file.truncate(len(whole.encode()))
                    file.seek(0, 2)
                    file.write(lines)
        self._runs.update((run.asked.key, run) for run in made)

    def find_out(
        self,
        asked: Sequence[Asked],
        find: Callable[[Sequence[Asked]], Sequence[Mapping[str, Any]]],
        environment: Mapping[str, Any],
    ) -> None:
        """Find out what is not known of some questions, and keep it; an error is a result, and ends no other."""
        missing = [each for each in asked if each not in self]
        if not missing:
            return
        begun, busy = time.perf_counter(), CoreWatch()
        try:
            found = find(missing)
        except Exception as error:
            if len(missing) == 1:
                self.keep([Run(missing[0], {}, _said(error), environment=environment)])
            for each in missing if len(missing) > 1 else ():
                self.find_out([each], find, environment)
            return
        seconds, load = (time.perf_counter() - begun) / len(missing), busy.read()
        self.keep(Run(*pair, None, seconds, environment, load) for pair in zip(missing, found, strict=True))

    def _read(self, number: int, line: str) -> Run:
        try:
            return parsed(line, Run)
        except ValueError as wrong:
            raise BenchError(
                f"line {number} of {self._file} is no run of this version of selfspec ({wrong}); give "
                "another folder, or take the line out"
            ) from None


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


@dataclass(frozen=True)
class Origin:
    """Identifies what was measured; a part of every key of the lab.

    `base` is the fingerprint of the weights, shortened; `setting` a digest of these and all else: dtype, configuration,
    end tokens, device, threads, versions, kernels.
    """

    base: str
    setting: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> Origin:
        """Identify a model as it is; one with offloaded weights, which cannot be told from others, is a BenchError."""
        try:
            base = fingerprint(model, torch.float32)
        except ValueError as reason:
            raise BenchError(f"figures belong to weights, and {reason}: load the model whole") from reason
        setting = [
            base,
            str(model.dtype),
            json.loads(model.config.to_json_string(use_diff=False), object_hook=_without_names),
            model.config._attn_implementation,
            sorted(end_tokens(model)),
            environment(model.device),
        ]
        return cls(base[:20], hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:20])

    @property
    def short(self) -> str:
        """The weights' name in reports."""
        return self.base[:8]


def _without_names(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _UNSAID}


def told_apart(models: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return report names of models, by name and weights: where a name has several weights, these follow it."""
    every = list(dict.fromkeys(models))
    names = [name for name, _ in every]
    return {(name, base): name if names.count(name) == 1 else f"{name} {base[:8]}" for name, base in every}
