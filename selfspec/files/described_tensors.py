"""Read and write safetensors files with a description and checksums; nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec.errors import DraftConfigError
from selfspec.files.json_text import parsed, sealed
from selfspec.files.writing import whole

_About = TypeVar("_About")
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class _Written:
    """The SHA-256 of each tensor by name, and the checksum of the description."""

    sha256: dict[str, str]
    checksum: str


class DescribedTensors(Generic[_About]):
    """A file of tensors for a draft, written by `write_described`. Tensors are read one by one.

    Args:
        file: the file to read.
        what: name of the kind of file, for messages.
        key: key of the description in the metadata.
        kind: dataclass of the description, `about`.
        remedy: what to do about a file that cannot be used.

    Raises:
        DraftConfigError: the file is missing, truncated, foreign or of another format, or its description is damaged.
    """

    def __init__(self, file: str | Path, what: str, key: str, kind: type[_About], remedy: str) -> None:
        self.source, self.remedy, self._what = str(file), remedy, what
        with self._reading():
            self._tensors = cast(Any, safe_open(self.source, framework="pt"))
            self._said = (self._tensors.metadata() or {}).get(key, "")
        self.about = self.described_as(kind)
        self._sha256 = self.described_as(_Written).sha256
        self.check_names(self._sha256)

    def described_as(self, kind: type[_Kind]) -> _Kind:
        """Read fields of the description as a dataclass.

        Raises:
            DraftConfigError: a field is missing or wrong.
        """
        with self._reading():
            return parsed(self._said, kind)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        # ValueError: the description is missing or wrong.
        except (OSError, SafetensorError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DraftConfigError(f"{self.source} cannot be read as {self._what} ({reason}); {self.remedy}") from error

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors.keys())

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse a file whose tensors are not exactly these.

        Raises:
            DraftConfigError: it names a tensor that is missing or unexpected.
        """
        wanted, found = set(names), set(self.names)
        for what, others in (("lacks", wanted - found), ("has beside its own tensors", found - wanted)):
            if others:
                raise DraftConfigError(f"{self.source} {what} {min(others)}; {self.remedy}")

    def read(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            DraftConfigError: the file lacks it, or it is damaged.
        """
        try:
            found: Tensor = self._tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise DraftConfigError(f"{self.source} lacks {name} ({error}); {self.remedy}") from error
        if _digest(found) != self._sha256[name]:
            raise DraftConfigError(f"{self.source} is damaged: {name} is not what was written; {self.remedy}")
        return found

    def read_like(self, name: str, like: Tensor) -> Tensor:
        """Read a tensor that must have the dtype and shape of `like`.

        Raises:
            DraftConfigError: the file lacks the tensor, or its dtype or shape differs.
        """
        found = self.read(name)
        if (found.dtype, found.shape) != (like.dtype, like.shape):
            raise DraftConfigError(
                f"{self.source} holds {name} as {found.dtype} {list(found.shape)} and not as {like.dtype} "
                f"{list(like.shape)}; {self.remedy}"
            )
        return found


def write_described(file: Path, key: str, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and their description, under `key` of the metadata: the whole file or none of it.

    Raises:
        StorageError: the file cannot be written.
    """
    said = sealed({**about, "sha256": {name: _digest(values) for name, values in tensors.items()}})
    with whole(file) as draft:
        save_file(dict(tensors), draft, {key: json.dumps(said)})


def _digest(values: Tensor) -> str:
    found = hashlib.sha256(f"{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}\n".encode())
    found.update(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
