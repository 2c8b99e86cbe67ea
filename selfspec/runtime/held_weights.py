"""The places where modules hold weights and buffers, and a way to swap tensors in for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class HeldWeights:
    """Weights and buffers, and the places where modules hold them.

    Attributes:
        holders: a module's own weights or buffers by name, once for each of `names`.
        names: of a weight in its holder.
    """

    holders: tuple[dict[str, Any], ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> HeldWeights:
        """Collect those of some modules, without their children."""
        places: dict[tuple[int, str], dict[str, Any]] = {}
        for module in modules:
            for holder in (module._parameters, module._buffers):
                places |= {(id(holder), name): holder for name, tensor in holder.items() if tensor is not None}
        return cls(tuple(places.values()), tuple(name for _, name in places))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors now held there."""
        return tuple(holder[name] for holder, name in zip(self.holders, self.names, strict=True))

    @contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Put these tensors there for a while."""
        before = self.tensors
        try:
            self._put(tensors)
            yield
        finally:
            self._put(before)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for holder, name, tensor in zip(self.holders, self.names, tensors, strict=True):
            # A traced tensor is no parameter and need not be one here.
            holder[name] = tensor
