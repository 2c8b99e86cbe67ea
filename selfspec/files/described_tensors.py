"""Files of tensors that say what they are, with checksums: safetensors, so nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from selfspec.errors import DraftConfigError
from selfspec.files.json_text import parsed, sealed
from selfspec.files.writing import whole

_About = TypeVar("_About")
_Array = TypeVar("_Array", bound=Any)


@dataclass(frozen=True)
class _Written:
    """The SHA-256 of each tensor by name, and the checksum of all that the file says."""

    sha256: dict[str, str]
    checksum: str


class DescribedTensors(Generic[_About]):
    """A file of tensors for a draft that `write_described` wrote. They are read one by one.

    Args:
        file: what to read.
        what: it should be, for messages.
        key: of the description in the metadata.
        kind: dataclass of the description, `about`.
        framework: of the arrays that are read.
        remedy: what to do about a file that cannot be used.

    Raises:
        DraftConfigError: it is missing, truncated, foreign or of another format, or what it says of itself is
            damaged.
    """

    def __init__(
        self, file: str | Path, what: str, key: str, kind: type[_About], framework: Literal["np", "pt"], remedy: str
    ) -> None:
        self.source = str(file)
        self.remedy = remedy
        try:
            self._tensors = cast(Any, safe_open(self.source, framework=framework))
            said = (self._tensors.metadata() or {}).get(key, "")
            self.about = parsed(said, kind)
            self._sha256 = parsed(said, _Written).sha256
        # ValueError: it says nothing of itself, or something else.
        except (OSError, SafetensorError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DraftConfigError(f"{file} cannot be read as {what} ({reason}); {remedy}") from error
        self.check_names(self._sha256)

    @property
    def names(self) -> list[str]:
        """Of the tensors."""
        return list(self._tensors.keys())

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse a file that has other tensors than these.

        Raises:
            DraftConfigError: naming one that it lacks, or has beside them.
        """
        wanted, found = set(names), set(self.names)
        for what, others in (("lacks", wanted - found), ("has beside its own tensors", found - wanted)):
            if others:
                raise DraftConfigError(f"{self.source} {what} {min(others)}; {self.remedy}")

    def read(self, name: str) -> Any:
        """Read a tensor.

        Raises:
            DraftConfigError: the file lacks it, or it is damaged.
        """
        try:
            found = self._tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise DraftConfigError(f"{self.source} lacks {name} ({error}); {self.remedy}") from error
        if _digest(found) != self._sha256[name]:
            raise DraftConfigError(f"{self.source} is damaged: {name} is not what was written; {self.remedy}")
        return found

    def read_like(self, name: str, like: _Array) -> _Array:
        """Read a tensor of the type and shape of another.

        Raises:
            DraftConfigError: the file lacks it, or has it with others.
        """
        found = self.read(name)
        if (found.dtype, found.shape) != (like.dtype, like.shape):
            raise DraftConfigError(
                f"{self.source} holds {name} as {found.dtype} {list(found.shape)} and not as {like.dtype} "
                f"{list(like.shape)}; {self.remedy}"
            )
        return cast(_Array, found)


def write_described(file: Path, key: str, about: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write tensors, all of torch or all of numpy, and what they are: the whole file or none of it.

    The description is under a key of the metadata, as `DescribedTensors` reads it.

    Raises:
        StorageError: it cannot be written.
    """
    said = sealed({**about, "sha256": {name: _digest(values) for name, values in tensors.items()}})
    of_torch = any(isinstance(values, Tensor) for values in tensors.values())
    save: Any = safetensors.torch.save_file if of_torch else safetensors.numpy.save_file
    with whole(file) as draft:
        save(dict(tensors), draft, {key: json.dumps(said)})


def _digest(values: Any) -> str:
    """SHA-256 of the dtype, the shape and the values of a tensor or an array."""
    found = hashlib.sha256(f"{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}\n".encode())
    if isinstance(values, Tensor):
        values = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    found.update(np.ascontiguousarray(values).data)
    return found.hexdigest()
