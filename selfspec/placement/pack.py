"""Write a checkpoint with packed weights: `selfspec.pack` and the command of this name."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from selfspec.errors import CheckpointError, StorageError
from selfspec.files.writing import check_new, check_output_folder, sealed, whole_folder
from selfspec.formats.format import Format
from selfspec.formats.packed import Packed
from selfspec.model.checkpoint import PACKED, local_folder, read_config, weight_files
from selfspec.model.identity import fingerprint
from selfspec.placement.packed import exact_format, pack_each
from selfspec.placement.plan import shown_bytes
from selfspec.placement.skeleton import DTYPES, DeferredTensor, skeleton
from selfspec.placement.stored import (
    DTYPES_IN_FILES,
    METADATA,
    MappedFiles,
    PackedMetadata,
    PackedShape,
    StoredWeight,
    WeightFiles,
    bits_sum,
    config_digests,
    is_packed,
    stored_tensors,
)
from selfspec.placement.whole import load_whole

# Files of a checkpoint that hold weights, or say where they are.
_WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_NAMES = {dtype: name for name, dtype in DTYPES_IN_FILES.items()}
# Kernels read whole cache lines.
_LINE = 64


@dataclass(frozen=True)
class PackedFolder:
    """Says what `pack` wrote.

    Attributes:
        source: fingerprint of the model.
        packed: how many weights are packed; those of the experts of a mixture are one or two a layer.
        kept: how many are as they were.
        bytes: of the file with the weights.
        source_bytes: of the weights in the source's files.
        bits: of a number in a packed weight, all parts counted.
        parts: bytes of each part of the packed weights, by name.
    """

    folder: str
    format: str
    source: str
    packed: int
    kept: int
    bytes: int
    source_bytes: int
    bits: float
    parts: dict[str, int]


def pack(path: str | Path, to: str | Path, *, weights: str = "planes") -> PackedFolder:
    """Write the checkpoint in a folder to another one, with packed weights, which `selfspec.load` maps.

    Not one bit of a weight changes. One weight at a time is in memory. The folder is written whole or not at all, and
    loaded once before it is kept. It is bound to its config.json: with another one it is refused.

    Args:
        path: a folder with safetensors files.
        to: a new folder.
        weights: the format, "planes": see docs/planes.md.

    Raises:
        CheckpointError: files are missing or unreadable, or are packed already.
        UnsupportedModelError: no weight fits the format.
        UnsupportedOptionError: there is no such format.
        StorageError: the folder is there already, or cannot be written.
    """
    format, folder, to = exact_format(weights), local_folder(str(path)), Path(to)
    if folder is None:
        raise CheckpointError(f"{str(path)!r} is no folder; download the checkpoint, and give its folder")
    if is_packed(folder):
        raise CheckpointError(f"{folder} is packed already; load it, or give the checkpoint that it was packed from")
    check_new(to, "give another folder")
    check_output_folder(to)
    config = read_config(str(path))
    source_bytes = sum(each.nbytes for each in stored_tensors(weight_files(folder, config)).values())
    _check_room(to, source_bytes)
    with whole_folder(to) as draft:
        for file in filter(Path.is_file, folder.iterdir()):
            if not file.name.endswith(_WEIGHT_FILES):
                shutil.copyfile(file, draft / file.name)
        with (draft / PACKED).open("wb") as opened:
            writer = _write(opened, format, folder, config)
            # What is written is loaded once; that refuses what cannot be read again.
            writer.close("", draft)
            opened.flush()
            source = fingerprint(load_whole(str(draft), device="cpu"))
            writer.close(source, draft)
    return PackedFolder(
        str(to),
        format.name,
        source,
        packed=len(writer.weights),
        kept=writer.kept,
        bytes=(to / PACKED).stat().st_size,
        source_bytes=source_bytes,
        bits=8 * writer.parts.total() / sum(torch.Size(each.shape).numel() for each in writer.weights.values()),
        parts=dict(writer.parts),
    )


def _write(file: BinaryIO, format: Format, folder: Path, config: PreTrainedConfig) -> _Writer:
    """Write the weights of a model, packed where they fit, and its buffers, by their names in the model."""
    files, stored = MappedFiles(), stored_tensors(weight_files(folder, config))
    # In this dtype no weight is rounded on its way.
    dtypes = [each.dtype for each in stored.values() if each.dtype in DTYPES]
    made = skeleton(folder, config, reduce(torch.promote_types, dtypes) if dtypes else None, files)
    given: dict[str, Callable[[], Tensor | StoredWeight]] = {
        name: weight.detach for name, weight in made.model.named_parameters() if not weight.is_meta
    }
    given |= {name: partial(_as_stored, weight, files) for name, weight in made.deferred.items()}
    parameters = dict(made.model.named_parameters(remove_duplicate=False))
    buffers = {name: each for name, each in made.model.state_dict().items() if name not in parameters}
    writer = _Writer(file, format, len(given) + len(buffers))
    for held in pack_each(made.model, format, given):
        if isinstance(held.value, Packed):
            writer.write_packed(held.names[0], held.value, held.dtype, held.transposed)
        elif isinstance(held.value, Tensor):
            writer.write(held.names[0], held.value)
    for name, each in buffers.items():
        if isinstance(each, Tensor):
            writer.write(name, each)
    return writer


def _as_stored(weight: DeferredTensor, files: WeightFiles) -> Tensor:
    """Read a weight with the bits, and in the dtype, that it has in the files."""
    if weight.stored is not None:
        return weight.stored.read(files)
    values = weight.values()
    narrow = values.to(weight.dtype_in_files)
    return narrow if torch.equal(narrow.to(values.dtype), values) else values


class _Writer:
    """Writes a packed file tensor by tensor, each on a line of the cache; `close` writes what is known at the end."""

    def __init__(self, file: BinaryIO, format: Format, names: int) -> None:
        self._file, self._format = file, format
        self._header: dict[str, Any] = {}
        self._sums: dict[str, str] = {}
        self.weights: dict[str, PackedShape] = {}
        self.kept, self.parts = 0, Counter[str]()
        # Room for a header with this many tensors, whose names are long.
        self._start = 4096 + 1024 * names * len(format.parts)
        file.seek(self._start)

    def write(self, name: str, values: Tensor) -> None:
        """Write a tensor as it is."""
        self.kept += 1
        self._append(name, values)

    def write_packed(self, name: str, packed: Packed, dtype: torch.dtype, transposed: bool) -> None:
        """Write the parts of a weight, whose values have this dtype."""
        self.weights[name] = PackedShape(tuple(packed.shape), _NAMES[dtype], transposed)
        for part, values in packed.parts.items():
            self.parts[part] += values.nbytes
            self._append(f"{name}.{part}", values)

    def close(self, source: str, folder: Path) -> None:
        """Write the header, with the fingerprint of the model; the folder has its configuration."""
        about = PackedMetadata(2, self._format.name, source, config_digests(folder), self.weights, self._sums)
        header = {"__metadata__": {METADATA: json.dumps(sealed(asdict(about)))}, **self._header}
        text = json.dumps(header).encode()
        self._file.seek(0)
        # Headers may end in spaces.
        self._file.write((self._start - 8).to_bytes(8, "little") + text.ljust(self._start - 8))

    def _append(self, name: str, values: Tensor) -> None:
        self._sums[name] = bits_sum(values)
        self._place(name, values)
        gap = -self._file.tell() % _LINE
        if gap:
            # Tensors follow each other.
            self._place(f"_{len(self._header)}", torch.zeros(gap, dtype=torch.uint8))

    def _place(self, name: str, values: Tensor) -> None:
        data = values.contiguous().reshape(-1).view(torch.uint8)
        first = self._file.tell() - self._start
        self._file.write(data.numpy().data)
        self._header[name] = {
            "dtype": _NAMES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [first, first + len(data)],
        }


def _check_room(to: Path, most: int) -> None:
    """Refuse a disk without room for what is at most written."""
    place = to.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < most:
        raise StorageError(
            f"{to} may take {shown_bytes(most)}, and its disk has {shown_bytes(free)}; free some, or give a folder on "
            "another disk"
        )
