"""Rows that join a cache and leave it: each keeps what it holds, and storage is as large as it was asked to be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selfspec.cache.shared_cache import SharedCache

CPU = torch.device("cpu")
DEPTH, HEADS, DIM, LIMIT, SLACK = 2, 2, 3, 40, 4


def filled(length: int, seed: int) -> tuple[SharedCache, Tensor]:
    """A cache of one row with so many tokens, and what it holds, `[layers, heads, tokens, head_dim]`."""
    cache = SharedCache(DEPTH, 1, LIMIT, SLACK, CPU)
    cache.hold(1, max(length, 1))
    held = torch.randn(DEPTH, HEADS, length, DIM, generator=torch.Generator().manual_seed(seed))
    if length:
        for layer in range(DEPTH):
            cache.update(held[layer][None], -held[layer][None], layer)
        cache.commit([length])
    return cache, held


def check(cache: SharedCache, rows: list[Tensor]) -> None:
    assert cache.seq_lens == tuple(row.shape[2] for row in rows)
    for number, layer in enumerate(cache.layers):
        if layer.keys is None:
            assert not any(row.shape[2] for row in rows)
            continue
        assert len(layer.keys) == len(layer.values) == len(rows)
        for index, row in enumerate(rows):
            length = row.shape[2]
            assert torch.equal(layer.keys[index, :, :length], row[number])
            assert torch.equal(layer.values[index, :, :length], -row[number])
            # NaN that a row before left would spoil every attention that looks there.
            assert layer.keys[index, :, length:].isfinite().all()


@settings(max_examples=60)
@given(st.data())
def test_rows_keep_what_they_hold(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 9))
    cache, row = filled(length, 0)
    rows = [row]
    for seed in range(1, data.draw(st.integers(1, 9))):
        if data.draw(st.booleans()) and len(rows) > 1:
            # Rows leave; the last ones may fill their places.
            gone = data.draw(st.sets(st.sampled_from(range(len(rows))), min_size=1, max_size=len(rows) - 1))
            stay = len(rows) - len(gone)
            last = iter([index for index in range(stay, len(rows)) if index not in gone])
            kept = [next(last) if place in gone else place for place in range(stay)]
            cache.keep(kept)
            rows = [rows[index] for index in kept]
        else:
            other, row = filled(data.draw(st.integers(0, 12)), seed)
            longest = max(each.shape[2] for each in [*rows, row])
            spare = data.draw(st.integers(0, 3))
            cache.hold(len(rows) + 1 + spare, max(longest, 1) + data.draw(st.integers(0, 5)))
            cache.join(other)
            rows.append(row)
        check(cache, rows)


def test_a_row_that_joins_finds_clean_slots() -> None:
    cache, first = filled(5, 0)
    other, _ = filled(7, 1)
    cache.hold(2, 8)
    cache.join(other)
    for layer in cache.layers:
        layer.keys[1] = torch.nan
    cache.keep([0])
    third, row = filled(2, 2)
    cache.join(third)
    check(cache, [first, row])


def test_a_row_that_moves_takes_nothing_but_its_own() -> None:
    cache, _ = filled(5, 0)
    other, second = filled(3, 1)
    cache.hold(2, 8)
    cache.join(other)
    for layer in cache.layers:
        layer.keys[0], layer.values[0] = torch.nan, torch.nan
    cache.keep([1])
    check(cache, [second])


def test_storage_is_what_was_asked_for() -> None:
    cache, _ = filled(5, 0)
    one = cache.nbytes
    assert one == DEPTH * 2 * HEADS * DIM * (5 + SLACK) * 4
    cache.hold(3, 10)
    assert cache.nbytes == 3 * DEPTH * 2 * HEADS * DIM * (10 + SLACK) * 4
    cache.hold(1, 5)
    assert cache.nbytes == one
    assert (cache.cursors.held, cache.cursors.room, cache.cursors.capacity) == (1, 5, 5 + SLACK)


def test_what_does_not_fit_is_refused() -> None:
    cache, _ = filled(5, 0)
    with pytest.raises(ValueError, match="1 rows of 4 tokens"):
        cache.hold(1, 4)
    other, _ = filled(2, 1)
    with pytest.raises(ValueError, match="cannot take"):
        cache.join(other)
    cache.hold(2, 5)
    longer, _ = filled(6, 1)
    with pytest.raises(ValueError, match="cannot take"):
        cache.join(longer)
