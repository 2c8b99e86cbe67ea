"""Weights in files: dense ones, and packed ones, of which each part may be fetched by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from selfspec.errors import StorageError, UnsupportedModelError
from selfspec.formats.format import Format, formats
from selfspec.formats.packed import Packed, UnsupportedWeightError
from selfspec.placement.packed import multiplies, no_packed_weight, parameter_over
from selfspec.placement.plan import Stays
from selfspec.placement.skeleton import Skeleton, names_by_weight
from selfspec.placement.weight_source import PAGE, StoredWeight, WeightFiles, dtype_in_memory


@dataclass(frozen=True)
class WeightInFiles:
    """Locates the parts of a weight, `[..., out, in]`, by name; a dense weight is one part, `""`, without a format."""

    shape: torch.Size
    parts: Mapping[str, StoredWeight]
    format: Format | None = None

    @classmethod
    def dense(cls, weight: StoredWeight) -> WeightInFiles:
        """Locate a weight that is stored as it is."""
        return cls(torch.Size(weight.shape), {"": weight})

    def fetched(self, stays: Stays = Stays.NOTHING) -> list[str]:
        """Return the parts that are fetched where something stays of a layer."""
        if stays is Stays.WHOLE:
            return []
        if self.format is None:
            return [*self.parts]
        inside = drafts_inside(self.format) if stays is Stays.PART else {}
        return [part for part in self.format.fetched if not any(part in kind.parts for kind in inside.values())]

    def nbytes(self, dtype: torch.dtype, parts: Iterable[str] | None = None) -> int:
        """Count the bytes of some parts, or of all, in a model of a dtype."""
        return sum(bytes_in_memory(self.parts[part], dtype) for part in (self.parts if parts is None else parts))

    def parameter(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Parameter:
        """Make the parameter that a module holds of the parts, which are in memory."""
        if self.format is None:
            return nn.Parameter(parts[""], requires_grad=False)
        return parameter_over(self.format.layer(Packed(self.shape, parts), None, dtype))


def bytes_in_memory(part: StoredWeight, dtype: torch.dtype) -> int:
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


@torch.no_grad()
def packed_on_disk(made: Skeleton, format: Format, files: WeightFiles) -> dict[str, WeightInFiles]:
    """Locate packed weights by their first names; what no packed folder holds is packed to a file, gone with `files`.

    Raises:
        UnsupportedModelError: none fits.
        StorageError: the folder of temporary files has no room.
    """
    found: dict[str, WeightInFiles] = {}
    groups = [names for names in names_by_weight(made.model).values() if names[0] in made.deferred]
    try:
        with NamedTemporaryFile(prefix="selfspec-", suffix=f".{format.name}") as file:
            reason = ""
            for names in logging.tqdm(groups, desc="Packing weights", delay=2):
                there = made.deferred[names[0]].packed
                if there is not None and there.format == format:
                    found[names[0]] = WeightInFiles(there.shape, there.parts, format)
                    continue
                weight = made.deferred[names[0]].values()
                if not format.takes(weight) or not all(multiplies(made.model, each) for each in names):
                    continue
                try:
                    packed = format.pack(weight)
                except UnsupportedWeightError as error:
                    reason = f" ({names[0]} is {error})"
                    continue
                parts = {part: _written(file, values) for part, values in packed.parts.items()}
                found[names[0]] = WeightInFiles(packed.shape, parts, format)
            file.flush()
            files.keep_open(Path(file.name))
    except OSError as error:
        raise StorageError(
            f"packed weights cannot be written ({error.strerror}): set TMPDIR to a folder on a disk with room for them"
        ) from error
    if not found:
        raise UnsupportedModelError(no_packed_weight(made.model, format, reason))
    return found


def _written(file: Any, values: Tensor) -> StoredWeight:
    """Write a tensor from the next page on."""
    file.seek(-(-file.tell() // PAGE) * PAGE)
    start = file.tell()
    file.write(values.contiguous().numpy().data)
    return StoredWeight(Path(file.name), start, tuple(values.shape), values.dtype)
