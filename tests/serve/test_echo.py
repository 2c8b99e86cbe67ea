"""Log-probabilities of a prompt are those of one pass of the model over it, however long it is."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from helpers import tiny
from helpers.shrunken import shrunken
from selfspec.serve.token_texts import prompt_logprobs


def _longrope() -> PreTrainedModel:
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": 130}
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    return tiny.llama(vocab_size=64, max_position_embeddings=512, rope_parameters=parameters)


@pytest.mark.parametrize("length", [1, 2, 129, 140])
@pytest.mark.parametrize("name", ["falcon_mamba", "jamba", "longrope", "llama"])
def test_long_prompts_are_scored_as_a_whole(name: str, length: int) -> None:
    model = _longrope() if name == "longrope" else shrunken(name, vocab_size=64, max_position_embeddings=512)
    ids = tiny.prompt(length, vocabulary=64)
    found = prompt_logprobs(model, ids[0].tolist(), 2)
    with torch.no_grad():
        scores = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    expected = scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
    assert [each.logprob for each in found] == pytest.approx(expected, abs=1e-4)
    assert [each.top[0][0] for each in found] == scores.argmax(-1).tolist()
    assert all(len(each.top) == 2 for each in found)
