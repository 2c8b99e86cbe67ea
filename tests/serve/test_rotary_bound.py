"""Rotary tables that change with the length: an answer ends where they do, and says so; it is not refused."""

from __future__ import annotations

import pytest
from transformers import Phi3Config, Phi3ForCausalLM

from helpers.http_server import running


@pytest.mark.filterwarnings("ignore")
def test_an_answer_that_would_cross_the_place_ends_there() -> None:
    tables = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
    config = Phi3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=2,
        rope_parameters={**tables, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    )
    with running(model=Phi3ForCausalLM(config).double(), draft="lookup") as server:
        chat = server.chat(max_tokens=None, ignore_eos=True).body
        assert chat["usage"]["total_tokens"] == 64
        reply = server.complete(max_tokens=100, ignore_eos=True).body
        assert reply["usage"]["total_tokens"] == 64
        assert reply["choices"][0]["finish_reason"] == "length"
        assert server.complete(prompt="Lily said " * 60).status == 400
