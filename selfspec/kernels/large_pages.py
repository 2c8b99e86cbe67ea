"""Memory in pages of 2 MiB where the system has them: what is read from start to end then misses no address tables.

A pass reads every weight once. In pages of 4 KiB it looks up an address every 64 lines, and the tables do not stay in
the caches between two passes.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_PAGE = 1 << 21
_MOST_PAGES = 32
# Of a cache, in bytes.
_LINE = 64


class LargePages:
    """Room for tensors that stay, in pieces that grow. A piece goes when the last tensor in it goes."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._pages = 1

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in large pages; the tensor itself where there are none, and off the CPU."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or not hasattr(mmap, "MADV_HUGEPAGE"):
            return tensor
        if self._used + tensor.nbytes > self._piece.nbytes:
            self._piece = _piece(max(self._pages, math.ceil(tensor.nbytes / _PAGE)))
            self._used, self._pages = 0, min(2 * self._pages, _MOST_PAGES)
        room = self._piece[self._used : self._used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._used += math.ceil(tensor.nbytes / _LINE) * _LINE
        return room.copy_(tensor)


def _piece(pages: int) -> Tensor:
    memory = mmap.mmap(-1, pages * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
