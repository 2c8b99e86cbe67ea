"""The protocol of formats, and formats by name: those of this package, and those that other packages declare.

A format is one file: a frozen dataclass, whose fields are its settings, and the layer that multiplies by what it packs.
Drafts, files, plans of memory, native programs and summaries ask it, and know none by name.
"""

from __future__ import annotations

import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from selfspec.errors import DraftConfigError
from selfspec.formats.packed import (
    PANEL_ON_CPU,
    Packed,
    PackedLinear,
    PackedStack,
    PackedWeight,
    UnsupportedWeightError,
    fixed,
)
from selfspec.kernels import native

GROUP = "selfspec.formats"
"""The group of entry points in which other packages name their formats: `name = module:Class`."""


@dataclass(frozen=True)
class Format(ABC):
    """A way to keep weights of linear layers and experts. Every format drafts; it is written as a draft by its name.

    Attributes:
        name: the name, such as `int8`.
        help: one line that says what a draft in this format is.
        bits: bits of a weight, without scales.
        acceptance: acceptance of a draft in this format, by 1 - TV of trained checkpoints, for plans of memory.
        parts: names of the tensors that a packed weight is kept in.
        fetched: parts of an exact format that a memory budget may leave on the disk; the others are small.
        layer: the linear layer that multiplies by a packed weight, made as `layer(packed, bias, dtype)`.
        exact: whether the weight, made dense again, has the bits that it had.
        packs: whether it packs weights that are dense. Else only files have it.
        copies: whether it packs copies of any weight, to draft with. Else it keeps a model's own, or reads them.
        laying_out: copies of a packed weight that are in memory at once while a layer is made from it.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    bits: ClassVar[int]
    acceptance: ClassVar[float]
    parts: ClassVar[tuple[str, ...]]
    layer: ClassVar[type[PackedLinear]]
    fetched: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False
    packs: ClassVar[bool] = True
    copies: ClassVar[bool] = True
    laying_out: ClassVar[int] = 1

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in asdict(self).items())
        return f"{self.name} ({settings})" if settings else self.name

    @abstractmethod
    def empty(self, shape: Sequence[int], device: torch.device) -> Packed:
        """Make a packed weight without values, for a weight of `shape`, `[..., out, in]`.

        Raises:
            RuntimeError: the format does not fit this shape.
        """

    @abstractmethod
    def pack(self, weight: Tensor) -> Packed:
        """Pack a weight, `[..., out, in]`, of any floating dtype, on its device.

        Raises:
            RuntimeError: the format does not fit its shape.
        """

    def pack_head(self, weight: Tensor) -> Packed:
        """Pack a head over a vocabulary, `[out, in]`, whose large columns read inputs of any size."""
        return self.pack(weight)

    def parameter(self, packed: Packed, dtype: torch.dtype, transposed: bool = False) -> nn.Parameter:
        """Return the parameter that modules hold in place of a dense weight; transposed: as `[..., in, out]`."""
        is_one = len(packed.shape) == 2
        layer = self.layer(packed, None, dtype) if is_one else PackedStack(packed, self.layer, dtype)
        return fixed(PackedWeight(layer, transposed))

    def check(self, packed: Packed) -> None:
        """Refuse parts, read from a file, that `pack` never makes of a weight of this shape.

        Raises:
            UnsupportedWeightError: kernels would read or write outside of them.
        """
        for part, like in self.empty(packed.shape, torch.device("meta")).parts.items():
            found = packed[part]
            # Their number may depend on values.
            if found.dtype != like.dtype or (like.numel() and found.shape != like.shape):
                raise UnsupportedWeightError(f"{part} is {found.dtype} {list(found.shape)}")

    def fits(self, shape: Sequence[int], device: torch.device | None = None) -> bool:
        """Return whether the format fits a weight of `shape`, `[..., out, in]`, on a device; None: on some device."""
        return True

    def takes(self, weight: Tensor) -> bool:
        """Return whether the format fits a weight, `[..., out, in]`, that is in memory."""
        return self.fits(weight.shape, weight.device)

    def runs_on(self, kind: str) -> bool:
        """Return whether its layers run on a kind of device, such as "cuda"."""
        return kind != "meta"

    def joined_bytes(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> int:
        """Count the bytes of dense weights that a product of many rows in a dtype has at once.

        Those of a `KernelLinear`; a format with another layer says its own.
        """
        numel = math.prod(shape)
        if dtype == torch.bfloat16 and device.type == "cpu" and native.available():
            numel = min(numel, PANEL_ON_CPU + shape[-1])
        return numel * max(torch.float32.itemsize, dtype.itemsize)

    @property
    def sizes(self) -> str:
        """The sizes of layers that it fits, for messages: `linear layers` and this."""
        return "of any size"

    def nbytes(self, shape: Sequence[int]) -> int:
        """Count the bytes of a packed weight of `shape`."""
        return self.empty(shape, torch.device("meta")).nbytes


@dataclass(frozen=True)
class FormatOfFiles(Format):
    """Reads weights as they lie in files, whatever they were rounded from; none are made."""

    acceptance = 1.0
    exact = True
    packs = False
    copies = False

    def pack(self, weight: Tensor) -> Packed:
        raise RuntimeError(f"weights in {self.name} are only read from files")


@cache
def formats() -> Mapping[str, type[Format]]:
    """Return every format by name, the most faithful first; refuse a name declared twice, and what is no format."""
    found: dict[str, type[Format]] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)], "selfspec.formats."):
        for kind in vars(import_module(module.name)).values():
            if isinstance(kind, type) and issubclass(kind, Format) and "name" in vars(kind):
                found[kind.name] = kind
    for point in entry_points(group=GROUP):
        loaded: Any = point.load()
        if not (isinstance(loaded, type) and issubclass(loaded, Format)):
            raise DraftConfigError(f"{point.value} is no format; derive its class from selfspec.formats.format.Format")
        if found.setdefault(loaded.name, loaded) is not loaded:
            raise DraftConfigError(f"{point.value} declares the format {loaded.name!r}, and there is one already")
    return dict(sorted(found.items(), key=lambda each: -each[1].acceptance))


def copies() -> Mapping[str, type[Format]]:
    """Return the formats of copies that draft beside a model's own weights, by name, the most faithful first."""
    return {name: kind for name, kind in formats().items() if kind.copies}
