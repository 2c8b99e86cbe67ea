"""One pass that gives the logits of an early exit and of the whole network: those of two passes."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from helpers import tiny
from helpers.bench import Bench
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache
from selfspec.model.early_head import DraftHead
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.runtime.request import PassRequest

WIDTH = 7
EXACT = 1e-9


def bench(model: PreTrainedModel) -> Bench:
    cache = SharedCache(tiny.DEPTH, 2, limit=WIDTH + 1, slack=WIDTH, device=torch.device("cpu"))
    return Bench(model, ADAPTERS[model.config.model_type], cache, tiny.prompt(WIDTH, 2), 0)


@pytest.mark.parametrize(("exit_layer", "most"), [(1, WIDTH), (2, 4), (tiny.DEPTH - 1, 32)])
@torch.no_grad()
def test_logits_are_those_of_two_passes(architecture: str, exit_layer: int, most: int) -> None:
    model = tiny.BUILDERS[architecture]()
    if ADAPTERS[model.config.model_type].recurrent:
        pytest.skip("states do not roll back by a cursor, so that a prompt is never compared")
    one, other, third = (bench(model) for _ in range(3))
    draft, target = one.runner.compare(exit_layer, None, one.tokens, most)
    left = LayerPath.up_to(tiny.DEPTH, Sublayer(exit_layer, Part.ATTENTION))
    assert torch.allclose(draft, other.steps(left)[0][:, -most:], atol=EXACT, rtol=0)
    assert torch.allclose(target, third.steps(third.full)[0][:, -most:], atol=EXACT, rtol=0)


@torch.no_grad()
def test_the_head_of_an_exit_reads_its_states_alone(llama: PreTrainedModel) -> None:
    size = llama.config.hidden_size
    head = DraftHead(torch.nn.Linear(size, size, dtype=torch.float64), torch.tensor([3, 7, 11]))
    one, other = bench(llama), bench(llama)
    draft, target = one.runner.compare(2, head, one.tokens, 32)
    left = LayerPath.up_to(tiny.DEPTH, Sublayer(2, Part.ATTENTION))
    assert torch.allclose(
        draft, other.runner.run(PassRequest(left, other.tokens, head=head)).logits, atol=EXACT, rtol=0
    )
    assert torch.allclose(target, other.logits(other.full), atol=EXACT, rtol=0)
