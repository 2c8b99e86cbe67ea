"""Keep weights in pages of 2 MiB: in pages of 4 KiB, a pass looks up an address for every 64 cache lines."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor, nn

from selfspec.process import free_bytes

_PAGE = 1 << 21
_MOST_PAGES = 32
# Bytes of a cache line.
_LINE = 64


class LargePages:
    """Holds memory for tensors, in pieces that grow. A piece is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._piece: mmap.mmap | None = None
        self._used = 0
        self._pages = 1

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in large pages, or the tensor itself: off the CPU, or where there are none."""
        is_here = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() > 0
        if not is_here or not hasattr(mmap, "MADV_HUGEPAGE"):
            return tensor
        if self._piece is None or self._used + tensor.nbytes > len(self._piece):
            pages = max(self._pages, math.ceil(tensor.nbytes / _PAGE))
            try:
                piece = mmap.mmap(-1, pages * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                piece.madvise(mmap.MADV_HUGEPAGE)
            # This kernel has no large pages, or the process may not take more memory.
            except OSError:
                return tensor
            self._piece, self._used, self._pages = piece, 0, min(2 * self._pages, _MOST_PAGES)
        room = torch.frombuffer(self._piece, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += math.ceil(tensor.nbytes / _LINE) * _LINE
        return room.view(tensor.shape).copy_(tensor)


@torch.no_grad()
def move_weights(model: nn.Module) -> None:
    """Move a model's weights to large pages if there is free memory for a copy of them."""
    weights = [weight for weight in model.parameters() if type(weight) is nn.Parameter]
    wanted = sum(weight.nbytes for weight in weights)
    if not hasattr(mmap, "MADV_HUGEPAGE") or free_bytes() < wanted:
        return
    pages = LargePages()
    for weight in weights:
        weight.data = pages.moved(weight.data)
