"""Find and read single weights in safetensors files, without the page cache."""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from selfspec.errors import CheckpointError, StorageError

# Direct reads begin and end at multiples of this, in files and in memory.
_PAGE = 4096
# Reads of this size reach the speed of the disk.
_MOST_AT_ONCE = 1 << 26
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a safetensors file: its first byte, and the shape and dtype that it is stored in."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weight in the file."""
        return prod(self.shape) * self.dtype.itemsize


def stored_weights(files: Sequence[Path]) -> dict[str, StoredWeight]:
    """Return the places of a checkpoint's tensors, by name. Only headers are read.

    Raises:
        CheckpointError: a file is damaged, or has a dtype that cannot be read here.
    """
    found = {}
    for file in files:
        try:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
                size = os.fstat(opened.fileno()).st_size
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); copy or download it again") from error
        # Sorted by name: the first floating-point dtype is the model's if nothing else says it.
        for name in sorted(set(header) - {"__metadata__"}):
            entry = header[name]
            if entry["dtype"] not in _DTYPES:
                raise CheckpointError(
                    f"{name} in {file} is {entry['dtype']}; within a memory budget tensors are "
                    f"{', '.join(_DTYPES)}: load the checkpoint without one"
                )
            first, end = (8 + length + offset for offset in entry["data_offsets"])
            if end > size:
                raise CheckpointError(f"{file} is truncated: it ends before {name} does; copy or download it again")
            found[name] = StoredWeight(file, first, tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    return found


class ReadBuffer:
    """Memory that weights are read into, one at a time, with room for the largest."""

    def __init__(self, size: int) -> None:
        # Anonymous memory begins at a page.
        self._memory = mmap.mmap(-1, _up(size) + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def read(self, files: WeightFiles, weight: StoredWeight) -> Tensor:
        """Read a weight into this memory; the weight read before is overwritten.

        Raises:
            StorageError: the disk does not give the weight.
        """
        first = weight.start - weight.start % _PAGE
        files.read_into(memoryview(self._memory)[: _up(weight.start + weight.nbytes - first)], weight, first)
        read = self._bytes[weight.start - first :][: weight.nbytes]
        # A file aligns its weights no better than its header.
        aligned = read if weight.start % weight.dtype.itemsize == 0 else read.clone()
        return aligned.view(weight.dtype).view(weight.shape)


class WeightFiles:
    """The files of a checkpoint, open for direct reads. Closed when nothing refers to it."""

    def __init__(self) -> None:
        self._opened: dict[Path, int] = {}
        self._opening = threading.Lock()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At the end of the process the module's names may be gone.
        for opened in self._opened.values():
            close(opened)

    def read_into(self, memory: memoryview, weight: StoredWeight, first: int) -> None:
        """Fill memory with bytes of the weight's file from `first` on, at least to the weight's end.

        Raises:
            StorageError: the disk does not give the bytes.
        """
        done, least = 0, weight.start + weight.nbytes - first
        try:
            opened = self._open(weight.file)
            while done < least:
                read = os.preadv(opened, [memory[done : done + _MOST_AT_ONCE]], first + done)
                if not read:
                    raise StorageError(f"{weight.file} ends too early: was it changed? Copy it again, and load again")
                done += read
        except OSError as error:
            raise StorageError(
                f"{weight.file} cannot be read ({error.strerror}); see whether its disk is there, and load again"
            ) from error

    def _open(self, file: Path) -> int:
        with self._opening:
            if file not in self._opened:
                try:
                    self._opened[file] = os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
                except OSError:
                    # Some file systems have no direct reads.
                    self._opened[file] = os.open(file, os.O_RDONLY)
            return self._opened[file]


def _up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
