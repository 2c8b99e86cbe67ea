"""Copies of keys and values in fewer bits: how they are rounded, which tokens they hold, what passes see of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers import tiny
from selfspec.cache import view
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.tree import Tree
from selfspec.cache.view import CacheBits, CacheView, copied_bytes, rounded, through_copy
from selfspec.errors import DraftConfigError
from selfspec.kernels import native
from selfspec.model.layer_path import LayerPath
from selfspec.model.registry import find_adapter
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner


def states(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [6, 64, 128])
def test_numbers_move_by_half_a_level_of_their_group(bits: CacheBits, size: int) -> None:
    exact = states(2, 3, 5, size)
    levels, factors = rounded(exact, bits)
    assert levels.numel() + factors.nbytes == copied_bytes(exact.numel(), size, bits)
    read = through_copy(exact, levels, factors, torch.tensor([5, 2]), bits)
    groups = exact.unflatten(-1, (-1, 64 if size % 64 == 0 else size))
    level = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    moved = (read - exact).unflatten(-1, (groups.shape[-2], -1)).abs().amax(-1)
    assert (moved <= 0.501 * level + 1e-6).all()
    assert torch.equal(read[1, :, 2:], exact[1, :, 2:])
    assert not torch.equal(read[1, :, :2], exact[1, :, :2])


def test_groups_of_equal_numbers_are_kept() -> None:
    exact = torch.full((1, 1, 2, 64), 3.0)
    assert torch.equal(through_copy(exact, *rounded(exact, 4), torch.tensor([2]), 4), exact)


class Rows:
    """A model with a cache of some rows, and what a draft over copies sees of it."""

    def __init__(self, model: PreTrainedModel, lengths: list[int], seed: int = 0) -> None:
        adapter = find_adapter(model)
        self.cache: SharedCache = adapter.shared_cache(model, len(lengths), 200, 8, device=torch.device("cpu"))
        self.runner = ModelRunner(model, adapter, self.cache)
        self.cache.cursors.reserve(max(lengths))
        self.cache.hold(4, 150)
        self.runner.prefill(tiny.prompt(max(lengths), len(lengths), seed=seed), lengths)
        self.cache.commit(lengths)

    def drafted(self, bits: CacheBits | None) -> Tensor:
        rows = len(self.cache.seq_lens)
        path = LayerPath(self.runner.depth, view=CacheView(bits=bits))
        logits = self.runner.run(PassRequest(path, torch.full((rows, 2), 7))).logits
        self.cache.commit([0] * rows)
        return logits

    def assert_copied(self, bits: CacheBits) -> None:
        """Compare a draft with one over a copy that is made anew."""
        found = self.drafted(bits)
        for copy in self.cache._copies.values():
            copy.forget()
        assert torch.equal(found, self.drafted(bits))
        assert not torch.equal(found, self.drafted(None))


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
def test_a_copy_follows_its_rows(bits: CacheBits) -> None:
    model = tiny.llama()
    rows = Rows(model, [9, 12, 5])
    rows.assert_copied(bits)
    # More tokens, side by side or along a branch.
    rows.runner.run(PassRequest(LayerPath.full(4), tiny.prompt(3, 3, seed=4)))
    rows.cache.commit([3, 1, 2])
    rows.assert_copied(bits)
    rows.cache.open(Tree((-1, -1, 1)))
    rows.runner.run(PassRequest(LayerPath.full(4), tiny.prompt(4, 3, seed=5)))
    rows.cache.commit_paths([[-1, 1, 2], [-1, 0], [-1]])
    rows.assert_copied(bits)
    # Rows leave, come and move; one of the same length takes another's place.
    rows.cache.keep([0, 2])
    rows.assert_copied(bits)
    rows.cache.join(Rows(model, [13], seed=6).cache)
    rows.assert_copied(bits)
    rows.cache.narrow([2, 1])
    rows.assert_copied(bits)
    rows.cache.hold(2, 180)
    rows.assert_copied(bits)
    taken = Rows(model, [14])
    taken.assert_copied(bits)
    taken.cache.take(rows.cache, 0, 13)
    taken.assert_copied(bits)
    taken.cache.take(rows.cache, 1, 8)
    taken.assert_copied(bits)


@torch.no_grad()
def test_a_copy_is_made_once_of_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[tuple[list[int], list[int]]] = []
    inner = view._round_slots

    def noting(exact: list[Tensor], parts: list[Tensor], begins: list[int], ends: list[int], bits: int) -> None:
        spans.append((begins, ends))
        inner(exact, parts, begins, ends, bits)

    monkeypatch.setattr(view, "_round_slots", noting)
    rows = Rows(tiny.llama(), [6, 9])
    rows.drafted(8)
    rows.drafted(8)
    rows.runner.run(PassRequest(LayerPath.full(4), tiny.prompt(3, 2, seed=4)))
    rows.cache.commit([3, 1])
    rows.drafted(8)
    assert spans == [([0, 0], [6, 9]), ([6, 9], [9, 10])]


@torch.no_grad()
def test_only_drafts_see_it(llama: PreTrainedModel) -> None:
    rows = Rows(llama, [9])
    before = rows.drafted(None)
    drafted = rows.drafted(4)
    assert torch.equal(rows.drafted(None), before)
    # Its bytes count; it sees committed tokens as they were copied.
    assert rows.cache.nbytes > sum(layer.nbytes for layer in rows.cache.layers)
    rows.cache.layers[0].keys[:, :, 3] += 1
    assert torch.equal(rows.drafted(4), drafted)
    assert not torch.equal(rows.drafted(None), before)


@pytest.mark.parametrize("kept", ["int8", "host"])
def test_keys_and_values_that_are_kept_otherwise_are_refused(llama: PreTrainedModel, kept: str) -> None:
    cache = find_adapter(llama).shared_cache(llama, 1, 64, 8, kept=kept)  # type: ignore[arg-type]
    with pytest.raises(DraftConfigError, match=f"cache='{kept}'"):
        cache.check_copies()


@pytest.mark.kernels
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [6, 64, 192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_round_alike(bits: CacheBits, size: int, dtype: torch.dtype) -> None:
    assert native.available()
    exact = states(3, 2, 9, size).to(dtype)
    expected, factors = rounded(exact, bits)
    found = (torch.zeros_like(expected), torch.zeros(factors.shape))
    native.round_slots(exact, found[0], found[1], torch.tensor([0, 4, 2]), torch.tensor([9, 9, 2]))
    for row, begin in enumerate((0, 4)):
        assert torch.equal(found[0][row, :, begin:], expected[row, :, begin:])
        assert torch.equal(found[1][row, ..., begin:], factors[row, ..., begin:])
    assert not found[0][2].any()
    assert not found[0][1, :, :4].any()
