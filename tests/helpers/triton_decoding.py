"""Decoding by all kernels in Triton that it knows, by Triton's interpreter on the CPU, with TRITON_INTERPRET=1."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import selfspec
from helpers import tiny
from helpers.drafting import GREEDY, Oracle, stock
from selfspec.cache.tree import Tree
from selfspec.decode.noise import Noise, Purpose, drawn_by_race, race_noise
from selfspec.kernels import triton_attention, triton_judge, triton_norms, triton_rotary, triton_slots

SEAMS = (
    "selfspec.cache.shared_cache",
    "selfspec.decode.judge",
    "selfspec.runtime.few_rows",
    "selfspec.runtime.few_rows",
    "selfspec.runtime.few_rows",
)
KERNELS = {
    triton_attention: "block_attention",
    triton_slots: "slots_moved",
    triton_judge: "judge_chain",
    triton_norms: "rms_norm",
    triton_rotary: "rotated",
}


def drawn_as_on_a_device(noise: Noise, weights: Tensor, purpose: Purpose, first: int = 0) -> Tensor:
    return drawn_by_race(weights, race_noise(weights, noise._seeds(purpose, first, weights.shape[1])))


def check(tree: Tree, used: int, sampled: dict[str, Any], dtype: torch.dtype = torch.float64) -> None:
    """Drafts in a batch, with grouped queries and windows, give the text that they give without these kernels."""
    model, ids = tiny.mistral(dtype=dtype), tiny.prompt(9, batch=3)
    greedy = stock(model, ids, 12)
    spec = selfspec.wrap(
        model, Oracle(tree, greedy[:, 9:]), draft_length=len(tree), accept="token", runtime=selfspec.runtime.Eager()
    )
    expected = spec.generate(ids, max_new_tokens=12, **sampled).sequences
    assert torch.equal(expected, greedy) == (sampled == GREEDY)
    with ExitStack() as inside:
        for seam in SEAMS:
            inside.enter_context(mock.patch(f"{seam}.runs_triton", return_value=True))
        watched = {
            name: inside.enter_context(mock.patch.object(module, name, wraps=getattr(module, name)))
            for module, name in KERNELS.items()
        }
        assert torch.equal(spec.generate(ids, max_new_tokens=12, **sampled).sequences, expected)
    calls = {name: each.call_count for name, each in watched.items()}
    # A kernel that is not trusted is called no more: once for each kind of call.
    assert sum(count > 2 for count in calls.values()) == used, calls


if __name__ == "__main__":
    with mock.patch.object(Noise, "draw", drawn_as_on_a_device):
        drawn = {"do_sample": True, "seed": 3, "eos_token_id": None, "pad_token_id": 0}
        check(Tree((-1, -1, 0, 0, 1)), 3, GREEDY)
        check(Tree.chain(3), 3, drawn)
        check(Tree.chain(3), 4, GREEDY, torch.float32)
    print("all equal")
