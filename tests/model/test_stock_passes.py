"""What a stock model says of a text, block by block, is what it says of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers import tiny
from helpers.shrunken import shrunken
from selfspec.measure.rounding import Bound
from selfspec.measure.stock import blockwise_logits, read_reference
from selfspec.model import stock_passes
from selfspec.model.stock_passes import block_logits

# Of states that begin anew with a pass, of states that go on, and of none.
TYPES = ("mamba", "falcon_mamba", "jamba", "bamba", "mamba2", "lfm2", "llama", "opt")
BOUNDARY = 8
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
    "original_max_position_embeddings": BOUNDARY,
}


def longrope() -> PreTrainedModel:
    return tiny.llama(max_position_embeddings=64, rope_parameters=dict(LONGROPE))


def read(model: PreTrainedModel, ids: Tensor, widths: Sequence[int]) -> Tensor:
    return torch.cat(list(block_logits(model, ids.split(list(widths), 1))))


@torch.no_grad()
def whole(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("widths", [[6, 4, 4], [6, *[1] * 8], [14]])
@pytest.mark.parametrize("name", TYPES)
def test_blocks_say_what_the_whole_does(name: str, widths: list[int]) -> None:
    model, ids = shrunken(name, vocab_size=64), tiny.prompt(14, vocabulary=64)
    torch.testing.assert_close(read(model, ids, widths), whole(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("numbers", [64 * 5, 64 * 9, 1])
def test_a_long_text_is_read_as_often_as_its_logits_need(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_passes, "_NUMBERS_AT_ONCE", numbers)
    model, ids = shrunken("jamba", vocab_size=64), tiny.prompt(14, vocabulary=64)
    torch.testing.assert_close(read(model, ids, [4, 4, 4, 2]), whole(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [BOUNDARY, BOUNDARY + 1, 20])
def test_blocks_on_either_side_of_the_length_at_which_rotary_tables_change(length: int) -> None:
    model, ids = longrope(), tiny.prompt(length)
    widths = [4] * (length // 4) + [1] * (length % 4)
    torch.testing.assert_close(read(model, ids, widths), whole(model, ids))


def test_a_long_text_leaves_the_rotary_tables_of_short_ones() -> None:
    """Another thread may be in the middle of a pass."""
    model = longrope()
    whole(model, tiny.prompt(4))
    before = model.model.rotary_emb.inv_freq.clone()
    read(model, tiny.prompt(20), [4] * 5)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


@pytest.mark.parametrize("name", ["falcon_mamba", "jamba", "bamba"])
def test_the_rounding_of_models_with_states_is_rounding(name: str) -> None:
    model, bound = shrunken(name, torch.float32, vocab_size=64), Bound((2, 4))
    reference = read_reference(model, tiny.prompt(9, vocabulary=64), 8)
    bound.measure(model, reference)
    assert bound.largest < 1e-2
    # The reference are the passes of `model.generate`.
    found = blockwise_logits(model, reference.prompt, reference.tokens, 4).argmax(-1)
    assert found.tolist() == reference.logits.argmax(-1).tolist() == reference.tokens
