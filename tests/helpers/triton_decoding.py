"""Decoding by all kernels in Triton that it knows, by Triton's interpreter on the CPU, with TRITON_INTERPRET=1."""

from __future__ import annotations

from unittest import mock

import torch

import selfspec
from helpers import tiny
from helpers.drafting import GREEDY, Oracle, stock
from selfspec.cache.tree import Tree
from selfspec.kernels import triton_attention, triton_slots


def check() -> None:
    """Trees in a batch, with grouped queries and windows, give the model's own text, and each kernel is trusted."""
    model, ids = tiny.mistral(dtype=torch.float64), tiny.prompt(9, batch=3)
    expected = stock(model, ids, 16)
    tree = Tree((-1, -1, 0, 0, 1))
    spec = selfspec.wrap(model, Oracle(tree, expected[:, 9:]), draft_length=len(tree), runtime=selfspec.runtime.Eager())
    with (
        mock.patch("selfspec.runtime.grouped_queries.runs_triton", lambda _: True),
        mock.patch("selfspec.cache.shared_cache.runs_triton", lambda _: True),
        mock.patch.object(triton_attention, "block_attention", wraps=triton_attention.block_attention) as attention,
        mock.patch.object(triton_slots, "slots_moved", wraps=triton_slots.slots_moved) as moves,
    ):
        assert torch.equal(spec.generate(ids, max_new_tokens=16, **GREEDY).sequences, expected)
    # Without either kernel its trial alone would be one call.
    assert attention.call_count > tiny.DEPTH, attention.call_count
    assert moves.call_count > 1, moves.call_count


if __name__ == "__main__":
    check()
    print("all equal")
