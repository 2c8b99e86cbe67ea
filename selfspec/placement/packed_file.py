"""A file of packed weights: safetensors, written weight by weight, mapped when it is read, shared between processes."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor
from transformers.utils import logging

from selfspec.errors import CheckpointError
from selfspec.files.json_text import parsed
from selfspec.files.writing import sealed
from selfspec.formats.format import Format, formats
from selfspec.formats.packed import Packed, UnsupportedWeightError
from selfspec.model.checkpoint import PACKED
from selfspec.model.identity import sums
from selfspec.placement.weight_source import DTYPES_IN_FILES, StoredWeight, WeightFiles, stored_weights

_KEY = "packed"
_AGAIN = "pack the checkpoint again: selfspec pack"
# Kernels read whole cache lines.
_LINE = 64


@dataclass(frozen=True)
class PackedInFile:
    """Locates a packed weight, `[out, in]` in `dtype`: its parts in a file, and as tensors over the mapped file."""

    shape: torch.Size
    dtype: torch.dtype
    format: Format
    parts: Mapping[str, StoredWeight]
    mapped: Packed

    @property
    def nbytes(self) -> int:
        """Bytes of the dense weight."""
        return self.shape.numel() * self.dtype.itemsize

    def read(self, _: WeightFiles) -> Tensor:
        """Compute the dense weight."""
        return self.format.layer(self.mapped, None, self.dtype).join()


@dataclass(frozen=True)
class _Weight:
    """Describes a packed weight in the file."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _About:
    """Describes a packed file: its format, the fingerprint of the model it is of, and a sum of each tensor's bits."""

    version: Literal[1]
    format: str
    source: str
    weights: dict[str, _Weight]
    sums: dict[str, str]


def format_in(folder: Path) -> Format:
    """Return the format of a folder's packed weights, which are not read."""
    file = folder / PACKED
    # Refuses a file that is cut off.
    stored_weights([file])
    return _format_of(_about(file), file)


def _format_of(about: _About, file: Path) -> Format:
    kind = formats().get(about.format)
    if kind is None or not kind.exact:
        raise CheckpointError(f"{file} is in the format {about.format!r}, which is not known; {_AGAIN}")
    return kind()


def _about(file: Path) -> _About:
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    try:
        return parsed(str(header.get("__metadata__", {}).get(_KEY, "")), _About)
    except ValueError as error:
        raise CheckpointError(f"{file} does not describe packed weights ({error}); {_AGAIN}") from error


class PackedFile:
    """Reads the packed file of a folder. A missing part, or a changed one, raises `CheckpointError`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / PACKED
        stored = stored_weights([self._file])
        about = _about(self._file)
        self.format, self.source = _format_of(about, self._file), about.source
        self._mapped = _mapped(self._file)
        for name in logging.tqdm(about.sums, desc="Checking packed weights", delay=2):
            if name not in stored or _sum(self._tensor(stored[name])) != about.sums[name]:
                raise CheckpointError(f"{self._file} is damaged: {name} is not what was written; {_AGAIN}")
        self.weights: dict[str, StoredWeight | PackedInFile] = {
            name: where for name, where in stored.items() if name in about.sums
        }
        for name, weight in about.weights.items():
            parts = {part: self.weights.pop(f"{name}.{part}") for part in self.format.parts}
            self.weights[name] = self._located(weight, parts)

    def _located(self, weight: _Weight, parts: Mapping[str, Any]) -> PackedInFile:
        shape = torch.Size(weight.shape)
        mapped = Packed(shape, {part: self._tensor(where) for part, where in parts.items()})
        try:
            self.format.check(mapped)
        except UnsupportedWeightError as error:
            raise CheckpointError(f"{self._file} is damaged: of a weight {error}; {_AGAIN}") from error
        return PackedInFile(shape, DTYPES_IN_FILES[weight.dtype], self.format, parts, mapped)

    def _tensor(self, where: StoredWeight) -> Tensor:
        return self._mapped[where.start : where.start + where.nbytes].view(where.dtype).view(where.shape)


class PackedFileWriter:
    """Writes a packed file tensor by tensor, each on a line of the cache; `close` writes what is known at the end."""

    def __init__(self, file: BinaryIO, format: Format, names: int) -> None:
        self._file, self._format = file, format
        self._header: dict[str, Any] = {}
        self._weights: dict[str, _Weight] = {}
        self._sums: dict[str, str] = {}
        # Room for a header with this many tensors, whose names are long.
        self._start = 4096 + 1024 * names * len(format.parts)
        file.seek(self._start)

    def write(self, name: str, values: Tensor) -> None:
        """Write a tensor as it is."""
        self._sums[name] = _sum(values)
        self._append(name, values)

    def write_packed(self, name: str, packed: Packed, dtype: torch.dtype) -> None:
        """Write the parts of a weight, whose values have this dtype."""
        self._weights[name] = _Weight(tuple(packed.shape), _NAMES[dtype])
        for part, values in packed.parts.items():
            self.write(f"{name}.{part}", values)

    def close(self, source: str) -> None:
        """Write the header, with the fingerprint of the model."""
        about = _About(1, self._format.name, source, self._weights, self._sums)
        header = {"__metadata__": {_KEY: json.dumps(sealed(asdict(about)))}, **self._header}
        text = json.dumps(header).encode()
        self._file.seek(0)
        # Headers may end in spaces.
        self._file.write((self._start - 8).to_bytes(8, "little") + text.ljust(self._start - 8))

    def _append(self, name: str, values: Tensor) -> None:
        data = values.contiguous().reshape(-1).view(torch.uint8)
        first = self._file.tell() - self._start
        self._file.write(data.numpy().data)
        self._header[name] = {
            "dtype": _NAMES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [first, first + len(data)],
        }
        gap = -self._file.tell() % _LINE
        if gap:
            # Tensors follow each other.
            self._append(f"_{len(self._header)}", torch.zeros(gap, dtype=torch.uint8))


_NAMES = {dtype: name for name, dtype in DTYPES_IN_FILES.items()}


def _sum(values: Tensor) -> str:
    return hashlib.sha256(sums(values.reshape(-1).view(torch.uint8)).numpy().tobytes()).hexdigest()[:16]


def _mapped(file: Path) -> Tensor:
    """Map a file; its pages are those of every process that maps it."""
    with file.open("rb") as opened:
        # Torch warns of memory that it has no way to write to; written pages would be copies.
        memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=torch.uint8)
