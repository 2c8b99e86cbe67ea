"""Rotary tables that change with the length: a row is read again where they do, and goes on as `model.generate`."""

from __future__ import annotations

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

import selfspec
from selfspec.serve.row_request import RowRequest, SamplingParams

CHANGE = 64
GREEDY = SamplingParams(temperature=0.0)


def phi3() -> Phi3ForCausalLM:
    torch.manual_seed(0)
    tables = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": CHANGE}
    config = Phi3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        original_max_position_embeddings=CHANGE,
        pad_token_id=0,
        eos_token_id=2,
        initializer_range=0.3,
        rope_parameters={**tables, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4},
    )
    return Phi3ForCausalLM(config).double().eval()


def texts(*lengths: int) -> list[tuple[int, ...]]:
    drawn = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(3, 512, (length,), generator=drawn).tolist()) for length in lengths]


def alone(model: Phi3ForCausalLM, text: tuple[int, ...], count: int) -> list[int]:
    out = model.generate(torch.tensor([text]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    new: list[int] = out[0, len(text) :].tolist()
    return new


@pytest.mark.parametrize("draft", ["lookup+exit:1", "none"])
def test_rows_on_both_sides_of_the_place_and_across_it_are_what_they_are_alone(draft: str) -> None:
    model = phi3()
    spec = selfspec.wrap(model, draft=draft, draft_length=3)
    prompts = texts(50, CHANGE + 1, 20, CHANGE - 1, CHANGE, 30, CHANGE + 2, 100, 62)
    with selfspec.Engine(spec, prefill_tokens=16, max_rows=4, cache_bytes=2**26) as engine:
        tickets = [engine.submit(RowRequest(text, 30, GREEDY, frozenset())) for text in prompts]
        found = [ticket.tokens(timeout=60) for ticket in tickets]
        # What is kept of one side serves texts of that side alone.
        again = [(*prompts[0], *found[0], 5), (*prompts[7][:70], 5), (*prompts[7][:40], 5), (*prompts[2], 5)]
        repeated = [engine.submit(RowRequest(text, 8, GREEDY, frozenset())).tokens(timeout=60) for text in again]
        assert engine.stats().cached_tokens > 0
    spec.unwrap()
    assert found == [alone(model, text, 30) for text in prompts]
    assert repeated == [alone(model, text, 8) for text in again]


def test_a_seeded_row_that_crosses_is_the_same_in_any_company() -> None:
    spec = selfspec.wrap(phi3(), draft="lookup", draft_length=3)
    request = RowRequest(
        texts(55)[0], 40, SamplingParams(temperature=0.9, seed=4, presence_penalty=0.5), frozenset(), 2
    )
    with selfspec.Engine(spec, kept_bytes=0) as engine:
        first = engine.submit(request).tokens(timeout=60)
        others = [engine.submit(RowRequest(text, 20, GREEDY, frozenset())) for text in texts(60, 70, 10)]
        assert engine.submit(request).tokens(timeout=60) == first
        assert all(len(other.tokens(timeout=60)) == 20 for other in others)
        assert len(first) == 40
