"""A widened model computes what the small one does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from widen import Size, padding_chance, places, stretch, widened

# Norms of a llama are computed in float32.
_CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 0}
SIZE = Size(hidden=48, heads=6, intermediate=40, layers=7)


def small(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).double().eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_the_small_models(tied: bool) -> None:
    model, prompt = small(tied), torch.arange(12)[None]
    wide = widened(model, SIZE)
    assert wide.get_output_embeddings().weight.shape == (60, SIZE.hidden)
    with torch.no_grad():
        torch.testing.assert_close(wide(prompt).logits, model(prompt).logits, **_CLOSE)


def test_a_padded_vocabulary_adds_no_likely_token() -> None:
    model, prompt = small(tied=False), torch.arange(12)[None]
    # States that have something in common, and a token that is far from it.
    model.model.embed_tokens.weight.data[:, 0] += 20.0
    model.lm_head.weight.data[59] = -torch.eye(32, dtype=torch.float64)[0]
    wide = widened(model, replace(SIZE, vocabulary=90))
    with torch.no_grad():
        torch.testing.assert_close(wide(prompt).logits[..., :60], model(prompt).logits, **_CLOSE)
    assert 0 < padding_chance(wide, model, prompt) < 1e-6


def test_layers_lie_evenly_and_the_last_one_is_last() -> None:
    assert places(3, 7) == [1, 3, 6]
    assert places(3, 3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 16}, "hidden"),
        ({"heads": 5}, "groups"),
        ({"layers": 2}, "no room"),
        ({"vocabulary": 40}, "vocabulary"),
        ({"vocabulary": 90}, "may be likely"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        widened(small(), replace(SIZE, **change))


def test_more_positions_are_told_apart() -> None:
    model = small()
    stretch(model.config, 4 * model.config.max_position_embeddings)
    longer = LlamaForCausalLM(LlamaConfig.from_dict(model.config.to_dict())).double().eval()
    longer.load_state_dict(model.state_dict())
    assert longer.config.max_position_embeddings == 8192
    with torch.no_grad():
        logits = [
            longer(torch.tensor([[5, 5, 7]]), position_ids=torch.tensor([[0, at, at + 1]])).logits[0, -1]
            for at in (1, 8000)
        ]
    assert not torch.allclose(*logits)
