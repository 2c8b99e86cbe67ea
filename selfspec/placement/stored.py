"""Weights in files: where the parts of each lie, reads of them, and the file that `selfspec pack` writes."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import platform
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils import logging

from selfspec.errors import CheckpointError, StorageError, UnsupportedOptionError
from selfspec.files.json_text import parsed
from selfspec.formats.format import Format, formats
from selfspec.formats.packed import Packed, UnsupportedWeightError, dense
from selfspec.model.checkpoint import CONFIG, PACKED, check_weight_files
from selfspec.model.identity import sums
from selfspec.placement.plan import Stays

# Direct reads begin and end at multiples of this, in files and in memory.
PAGE = 4096
# Reads of this size reach the speed of the disk.
_MOST_AT_ONCE = 1 << 26
DTYPES_IN_FILES = {
    **str_to_torch_dtype,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class StoredTensor:
    """Locates a tensor in a file by its first byte."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class StoredRun:
    """Locates a part of a weight, or several in bytes that lie next to one another in a file: one read fetches them."""

    parts: Mapping[str, StoredTensor]

    @property
    def whole(self) -> StoredTensor:
        """The tensor that is fetched: the only part, or bytes from the first of several to the end of the last."""
        first, *others = self.parts.values()
        if not others:
            return first
        end = others[-1].start + others[-1].nbytes
        return StoredTensor(first.file, first.start, (end - first.start,), torch.uint8)

    def split(self, fetched: Tensor) -> dict[str, Tensor]:
        """Return the parts, by name, as views of what was fetched."""
        if len(self.parts) == 1:
            return dict.fromkeys(self.parts, fetched)
        start = self.whole.start
        return {
            name: fetched[part.start - start :][: part.nbytes].view(part.shape) for name, part in self.parts.items()
        }


@dataclass(frozen=True)
class StoredWeight:
    """Locates the parts of a packed weight, `[..., out, in]`, by name; a dense weight is one part, `""`.

    Attributes:
        dtype: of its values.
        format: None: it is dense.
        transposed: whether modules hold it as `[..., in, out]`.
    """

    shape: torch.Size
    dtype: torch.dtype
    parts: Mapping[str, StoredTensor]
    format: Format | None = None
    transposed: bool = False

    @classmethod
    def dense(cls, tensor: StoredTensor) -> StoredWeight:
        """Locate a weight that is stored as it is."""
        return cls(torch.Size(tensor.shape), tensor.dtype, {"": tensor})

    def like(self) -> Tensor:
        """Make a tensor without values, as modules hold the weight."""
        made = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return torch.empty_like(made.mT, memory_format=torch.contiguous_format) if self.transposed else made

    def fetched(self, stays: Stays = Stays.NOTHING) -> list[str]:
        """Return the parts that are fetched where something stays of a layer."""
        if stays is Stays.WHOLE:
            return []
        if self.format is None:
            return [*self.parts]
        inside = drafts_inside(self.format) if stays is Stays.PART else {}
        return [part for part in self.format.fetched if not any(part in kind.parts for kind in inside.values())]

    def runs(self, stays: Stays = Stays.NOTHING) -> list[StoredRun]:
        """Return the parts that are fetched where something stays of a layer, those of one read together."""
        found: list[dict[str, StoredTensor]] = []
        named = ((name, self.parts[name]) for name in self.fetched(stays))
        for name, part in sorted(named, key=lambda each: (each[1].file, each[1].start)):
            if not found or not _follows(part, [*found[-1].values()][-1]):
                found.append({})
            found[-1][name] = part
        return [*map(StoredRun, found)]

    def nbytes(self, dtype: torch.dtype, parts: Iterable[str] | None = None) -> int:
        """Count the bytes of some parts, or of all, in a model of a dtype."""
        counted = [self.parts[part] for part in (self.parts if parts is None else parts)]
        return sum(bytes_in_memory(part, dtype) if self.format is None else part.nbytes for part in counted)

    def mapped(self, files: WeightFiles) -> dict[str, Tensor]:
        """Return all parts as tensors over the mapped file."""
        return {name: files.mapped(part) for name, part in self.parts.items()}

    def parameter(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Parameter:
        """Make the parameter that a module holds of the parts, which are in memory."""
        if self.format is None:
            return nn.Parameter(parts[""], requires_grad=False)
        return self.format.parameter(Packed(self.shape, parts), dtype, self.transposed)

    def read(self, files: WeightFiles) -> Tensor:
        """Read the dense weight into memory of its own."""
        if self.format is None:
            return files.read(self.parts[""])
        found: Tensor = dense(self.parameter(self.mapped(files), self.dtype))
        return found


def dtype_in_memory(stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of stored numbers in a model of a dtype: parts of packed weights stay as they are."""
    return dtype if stored.is_floating_point else stored


def bytes_in_memory(part: StoredTensor, dtype: torch.dtype) -> int:
    """Count the bytes of a stored part in a model of a dtype."""
    return part.numel * dtype_in_memory(part.dtype, dtype).itemsize


def drafts_inside(format: Format | None) -> dict[str, type[Format]]:
    """Return the formats, by name, that draft by a part of what an exact format keeps."""
    if format is None:
        return {}
    return {
        name: kind
        for name, kind in formats().items()
        if not kind.exact and not kind.copies and set(kind.parts) <= set(format.parts)
    }


def _follows(part: StoredTensor, before: StoredTensor) -> bool:
    """Return whether a part lies behind another but for an alignment; only bytes may begin anywhere in what is read."""
    bytes_alone = part.dtype == before.dtype == torch.uint8
    return bytes_alone and part.file == before.file and part.start - before.start - before.nbytes < PAGE


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the places of a checkpoint's tensors, by name. Only headers are read."""
    check_weight_files(files)
    found = {}
    for file in files:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        # Sorted by name: the first floating-point dtype is the model's if nothing else says it.
        for name in sorted(set(header) - {"__metadata__"}):
            entry = header[name]
            if entry["dtype"] not in DTYPES_IN_FILES:
                raise CheckpointError(
                    f"{name} in {file} is {entry['dtype']}; tensors are {', '.join(DTYPES_IN_FILES)}: load it with "
                    "transformers, and wrap the model"
                )
            first = 8 + length + entry["data_offsets"][0]
            found[name] = StoredTensor(file, first, tuple(entry["shape"]), DTYPES_IN_FILES[entry["dtype"]])
    return found


def lack_of_direct_reads() -> str | None:
    """Say why this system cannot read files into memory of its choice; None: it can."""
    missing = [name for where, name in ((os, "preadv"), (mmap, "MAP_ANONYMOUS")) if not hasattr(where, name)]
    if not missing:
        return None
    return (
        f"{platform.system()} has no {missing[0]}, by which weights are read within a memory budget: load checkpoints "
        "whole, without memory=, or use Linux, macOS or WSL"
    )


class ReadBuffer:
    """Holds memory that tensors are read into, one at a time, with room for the largest."""

    def __init__(self, size: int) -> None:
        lack = lack_of_direct_reads()
        if lack is not None:
            raise UnsupportedOptionError(lack)
        # Anonymous memory begins at a page.
        self._memory = mmap.mmap(-1, _up(size) + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def read(self, files: WeightFiles, tensor: StoredTensor) -> Tensor:
        """Read a tensor into this memory; the one read before is overwritten."""
        first = tensor.start - tensor.start % PAGE
        files.read_into(memoryview(self._memory)[: _up(tensor.start + tensor.nbytes - first)], tensor, first)
        read = self._bytes[tensor.start - first :][: tensor.nbytes]
        # A file aligns its tensors no better than its header.
        aligned = read if tensor.start % tensor.dtype.itemsize == 0 else read.clone()
        return aligned.view(tensor.dtype).view(tensor.shape)


class WeightFiles:
    """Keeps the files of a checkpoint open for direct reads, or mapped, until nothing refers to it."""

    def __init__(self) -> None:
        self._opened: dict[Path, int] = {}
        # Of each file when it was opened.
        self._states: dict[Path, tuple[int, int]] = {}
        self._opening = threading.Lock()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At the end of the process the module's names may be gone.
        for opened in self._opened.values():
            close(opened)

    def read_into(self, memory: memoryview, tensor: StoredTensor, first: int) -> None:
        """Fill memory with bytes of the tensor's file from `first` on, at least to the tensor's end."""
        done, least = 0, tensor.start + tensor.nbytes - first
        try:
            opened = self.opened(tensor.file)
            while done < least:
                read = os.preadv(opened, [memory[done : done + _MOST_AT_ONCE]], first + done)
                if not read:
                    raise StorageError(f"{tensor.file} ends too early: was it changed? Copy it again, and load again")
                done += read
            changed = _state(opened) != self._states[tensor.file]
        except OSError as error:
            raise StorageError(
                f"{tensor.file} cannot be read ({error.strerror}); see whether its disk is there, and load again"
            ) from error
        if changed:
            raise StorageError(
                f"{tensor.file} was changed while weights were read from it; let it be, and load the checkpoint again"
            )

    def read(self, tensor: StoredTensor) -> Tensor:
        """Read a tensor into memory of its own."""
        return ReadBuffer(tensor.nbytes).read(self, tensor)

    def mapped(self, tensor: StoredTensor) -> Tensor:
        """Map a tensor, whose pages are those of every process that maps its file, for as long as it is there."""
        if not tensor.numel:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        before = tensor.start % mmap.ALLOCATIONGRANULARITY
        with tensor.file.open("rb") as opened:
            # Torch warns of memory that it has no way to write to; written pages would be copies.
            memory = mmap.mmap(
                opened.fileno(), before + tensor.nbytes, access=mmap.ACCESS_COPY, offset=tensor.start - before
            )
        found = torch.frombuffer(memory, dtype=torch.uint8, offset=before)
        # A file aligns its tensors no better than its header.
        aligned = found if tensor.start % tensor.dtype.itemsize == 0 else found.clone()
        return aligned.view(tensor.dtype).view(tensor.shape)

    def opened(self, file: Path) -> int:
        """Return the descriptor of a file, which may be deleted once it is open."""
        with self._opening:
            if file not in self._opened:
                try:
                    self._opened[file] = os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
                except OSError:
                    # Some file systems have no direct reads.
                    self._opened[file] = os.open(file, os.O_RDONLY)
                self._states[file] = _state(self._opened[file])
            return self._opened[file]


class MappedFiles(WeightFiles):
    """Maps what is read: pages of the system's cache of files, where the next process finds them."""

    def read(self, tensor: StoredTensor) -> Tensor:
        return self.mapped(tensor)


def _state(opened: int) -> tuple[int, int]:
    """Return a file's size and the time of its last change, in nanoseconds."""
    found = os.fstat(opened)
    return found.st_size, found.st_mtime_ns


def _up(size: int) -> int:
    return -(-size // PAGE) * PAGE


METADATA = "packed"
"""Where the metadata of a packed file has what describes it."""
_AGAIN = "pack the checkpoint again: selfspec pack"
# Fields of a configuration that say nothing of what the weights are.
_OF_NO_WEIGHT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


@dataclass(frozen=True)
class PackedShape:
    """Describes a packed weight in a file: `[..., out, in]`, the dtype of its values, and how modules hold it."""

    shape: tuple[int, ...]
    dtype: str
    transposed: bool


@dataclass(frozen=True)
class PackedMetadata:
    """Describes a packed file.

    Attributes:
        source: fingerprint of the model.
        config: digests of the fields of its config.json.
        sums: of the bits of each tensor.
    """

    version: Literal[2]
    format: str
    source: str
    config: dict[str, str]
    weights: dict[str, PackedShape]
    sums: dict[str, str]

    def kind(self, file: Path) -> Format:
        """Return the format of the weights."""
        kind = formats().get(self.format)
        if kind is None or not kind.exact or not kind.packs:
            raise CheckpointError(f"{file} is in the format {self.format!r}, which is not known; {_AGAIN}")
        return kind()


def is_packed(folder: Path) -> bool:
    """Return whether a folder has packed weights, as `selfspec pack` writes them."""
    return (folder / PACKED).is_file()


def format_in(folder: Path) -> Format:
    """Return the format of a folder's packed weights, which are not read."""
    file = folder / PACKED
    # Refuses a file that is cut off.
    stored_tensors([file])
    return _metadata(file).kind(file)


def packed_weights(folder: Path, files: WeightFiles) -> dict[str, StoredWeight]:
    """Locate the weights of a packed folder. CheckpointError: a part is missing or changed, or config.json is."""
    file = folder / PACKED
    stored, about = stored_tensors([file]), _metadata(file)
    format = about.kind(file)
    digests = config_digests(folder)
    changed = sorted(each for each in {**digests, **about.config} if digests.get(each) != about.config.get(each))
    if changed:
        raise CheckpointError(
            f"the weights in {file} belong to another config.json: of this one {', '.join(changed[:5])} is changed; "
            f"restore it, or {_AGAIN}"
        )
    for name in logging.tqdm(about.sums, desc="Checking packed weights", delay=2):
        if name not in stored or bits_sum(files.mapped(stored[name])) != about.sums[name]:
            raise CheckpointError(f"{file} is damaged: {name} is not what was written; {_AGAIN}")
    parts = {name: stored[name] for name in about.sums}
    found: dict[str, StoredWeight] = {}
    for name, each in about.weights.items():
        located = {part: parts.pop(f"{name}.{part}") for part in format.parts}
        weight = StoredWeight(torch.Size(each.shape), DTYPES_IN_FILES[each.dtype], located, format, each.transposed)
        try:
            format.check(Packed(weight.shape, weight.mapped(files)))
        except UnsupportedWeightError as error:
            raise CheckpointError(f"{file} is damaged: of a weight {error}; {_AGAIN}") from error
        found[name] = weight
    return found | {name: StoredWeight.dense(tensor) for name, tensor in parts.items()}


def config_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256, cut short, of each field of a folder's config.json that says what the weights are."""
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    texts = {name: json.dumps(value, sort_keys=True) for name, value in config.items() if name not in _OF_NO_WEIGHT}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def bits_sum(values: Tensor) -> str:
    """Return a checksum of the bits of a tensor."""
    return hashlib.sha256(sums(values.reshape(-1).view(torch.uint8)).numpy().tobytes()).hexdigest()[:16]


def _metadata(file: Path) -> PackedMetadata:
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    try:
        return parsed(str(header.get("__metadata__", {}).get(METADATA, "")), PackedMetadata)
    except ValueError as error:
        raise CheckpointError(f"{file} does not describe packed weights ({error}); {_AGAIN}") from error
