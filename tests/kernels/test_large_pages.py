"""Tensors in large pages: the same values, one after the other."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from helpers import tiny
from selfspec.kernels.large_pages import LargePages, move_weights

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages here")


def test_tensors_move_with_their_values() -> None:
    pages = LargePages()
    for tensor in (torch.arange(15).view(3, 5), torch.rand(7), torch.rand(1300, 1700).half(), torch.rand(0, 4)):
        moved = pages.moved(tensor)
        assert moved.dtype == tensor.dtype
        assert torch.equal(moved, tensor)
        assert moved.is_contiguous()
        assert not moved.numel() or moved.data_ptr() % 64 == 0
        assert not moved.numel() or moved.data_ptr() != tensor.data_ptr()


def test_tensors_share_pieces_and_do_not_overlap() -> None:
    pages = LargePages()
    tensors = [torch.full((1000,), number, dtype=torch.int16) for number in range(50)]
    moved = [pages.moved(tensor) for tensor in tensors]
    assert max(each.data_ptr() for each in moved) - min(each.data_ptr() for each in moved) < 1 << 21
    assert all(map(torch.equal, moved, tensors))


def test_what_is_elsewhere_stays_there() -> None:
    tensor = torch.empty(3, device="meta")
    assert LargePages().moved(tensor) is tensor
    columns = torch.ones(3, 4).t()
    assert LargePages().moved(columns) is columns


def test_a_model_is_the_same_in_large_pages(tmp_path: Path) -> None:
    model, other = tiny.llama(), tiny.llama()
    move_weights(model)
    moved = dict(model.named_parameters())
    for name, weight in other.named_parameters():
        assert torch.equal(moved[name], weight)
        assert moved[name].requires_grad == weight.requires_grad
        assert moved[name].untyped_storage().nbytes() == weight.nbytes
    assert model.lm_head.weight is model.model.embed_tokens.weight or not model.config.tie_word_embeddings
    prompt = tiny.prompt(5)
    wanted = other.generate(prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), wanted)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(map(torch.equal, again.parameters(), other.parameters()))


def test_without_free_memory_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.kernels.large_pages.free_bytes", lambda: 10)
    model = tiny.llama()
    places = [weight.data_ptr() for weight in model.parameters()]
    move_weights(model)
    assert [weight.data_ptr() for weight in model.parameters()] == places


def test_a_kernel_without_large_pages_leaves_tensors_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    tensor = torch.ones(5)
    assert LargePages().moved(tensor) is tensor
