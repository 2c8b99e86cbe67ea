"""Tensors in large pages: the same values, one after the other."""

from __future__ import annotations

import mmap

import pytest
import torch

from selfspec.kernels.large_pages import LargePages

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages here")


def test_tensors_move_with_their_values() -> None:
    pages = LargePages()
    for shape, dtype in (
        ((3, 5), torch.int8),
        ((7,), torch.float32),
        ((1300, 1700), torch.uint8),
        ((0, 4), torch.int8),
    ):
        tensor = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
        moved = pages.moved(tensor)
        assert moved.dtype == dtype
        assert torch.equal(moved, tensor)
        assert moved.is_contiguous()
        assert not moved.numel() or moved.data_ptr() % 64 == 0
        assert not moved.numel() or moved.data_ptr() != tensor.data_ptr()


def test_tensors_share_pieces_and_do_not_overlap() -> None:
    pages = LargePages()
    tensors = [torch.full((1000,), number, dtype=torch.int16) for number in range(50)]
    moved = [pages.moved(tensor) for tensor in tensors]
    assert len({each.untyped_storage().data_ptr() for each in moved}) == 1
    assert all(map(torch.equal, moved, tensors))


def test_what_is_elsewhere_stays_there() -> None:
    tensor = torch.empty(3, device="meta")
    assert LargePages().moved(tensor) is tensor
    columns = torch.ones(3, 4).t()
    assert LargePages().moved(columns) is columns
