"""Places to sample at, and the model's distribution there, against plain enumeration."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from helpers import tiny
from helpers.shrunken import shrunken
from selfspec.measure.stock import bare
from selfspec.tools.verify.fit import NEW_TOKENS, Outcome, Place, choose_places

SAMPLES = 400
TEXTS = [tuple(tiny.prompt(12, seed=seed)[0].tolist()) for seed in range(3)]


def probabilities(model: PreTrainedModel, place: Place, outcomes: list[Outcome]) -> list[float]:
    """The model's probability of outcomes of one length, by one pass over the whole texts."""
    texts = torch.tensor([[*place.prefix, *outcome] for outcome in outcomes])
    with torch.no_grad():
        logits = model(texts).logits[:, len(place.prefix) - 1 : -1]
    chosen = (logits.float() / place.temperature).softmax(-1).gather(-1, texts[:, len(place.prefix) :, None])
    found: list[float] = chosen[..., 0].prod(-1).tolist()
    return found


@pytest.mark.parametrize("eos", [None, 3])
def test_cells_are_the_likely_outcomes_with_the_models_probabilities(llama: PreTrainedModel, eos: int | None) -> None:
    llama.generation_config = GenerationConfig(eos_token_id=eos)
    with torch.no_grad():
        # One token ends many of the texts.
        llama.get_output_embeddings().weight[3] = llama.get_output_embeddings().weight[:10].mean(0)
    places = choose_places(llama, TEXTS, SAMPLES)
    assert [place.temperature for place in places] == [1.0, 0.8]
    for place in places:
        assert any(place.prefix == text[at : at + 6] for text in TEXTS for at in range(7))
        assert math.isclose(sum(place.cells.values()) + place.rest, 1.0)
        assert place.discrepancy < 1e-9
        for outcome, probability in place.cells.items():
            assert math.isclose(probability, probabilities(llama, place, [outcome])[0], rel_tol=1e-4)
            assert len(outcome) == NEW_TOKENS or outcome[-1] == eos
            assert eos not in outcome[:-1]
            assert probability * SAMPLES >= 5
        assert place.rest * SAMPLES >= 5


def test_no_likely_outcome_is_left_out() -> None:
    model = tiny.llama(vocab_size=6)
    texts = [tuple(tiny.prompt(12, vocabulary=6)[0].tolist())]
    place = choose_places(model, texts, SAMPLES)[0]
    outcomes = list(itertools.product(range(6), repeat=NEW_TOKENS))
    joint = dict(zip(outcomes, probabilities(model, place, outcomes), strict=True))
    likely = {outcome for outcome, probability in joint.items() if probability * SAMPLES >= 5}
    # The smallest may have been pooled with what is too small by itself.
    assert len(likely - place.cells.keys()) <= 1
    assert place.cells.keys() <= likely


# States of the sizes that these types have by default would take gigabytes over all branches.
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
RECURRENT: dict[str, dict[str, Any]] = {
    "bamba": {},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_state": 8},
    "falcon_mamba": {},
    "granitemoehybrid": {},
    "jamba": {},
    "lfm2": {},
    "mamba": {},
    "mamba2": {},
    "olmo_hybrid": {},
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
}


@pytest.mark.parametrize("model_type", RECURRENT)
def test_branches_of_models_with_states(model_type: str) -> None:
    model = shrunken(model_type, **RECURRENT[model_type])
    rare = torch.full((50,), -40.0)
    rare[3:7] = 0.0
    # Few outcomes, so that many branches are followed, and some prefixes have none.
    handle = model.get_output_embeddings().register_forward_hook(lambda _, __, logits: logits * 0.3 + rare.to(logits))
    try:
        for place in choose_places(model, TEXTS, SAMPLES):
            assert len(place.cells) > NEW_TOKENS
            assert place.discrepancy < 1e-6
            for outcome, probability in place.cells.items():
                assert math.isclose(probability, probabilities(model, place, [outcome])[0], rel_tol=1e-3)
    finally:
        handle.remove()


def test_every_token_of_an_outcome_varies() -> None:
    texts = [tuple(tiny.prompt(20, seed=seed, vocabulary=6)[0].tolist()) for seed in range(3)]
    one, two = choose_places(tiny.llama(vocab_size=6), texts, SAMPLES)
    assert one.prefix != two.prefix
    for place in (one, two):
        assert place.rest < 0.5
        for position in range(NEW_TOKENS):
            assert len({outcome[position] for outcome in place.cells}) > 1


def test_a_text_shorter_than_the_prefix(llama: PreTrainedModel) -> None:
    assert choose_places(llama, [(5, 6)], SAMPLES)[0].prefix == (5, 6)


def test_a_bare_model_has_its_special_tokens_and_no_other_defaults(llama: PreTrainedModel) -> None:
    llama.generation_config = GenerationConfig(eos_token_id=[3, 4], pad_token_id=0, repetition_penalty=1.3, top_k=7)
    before = llama.generation_config
    copied = bare(llama)
    assert llama.generation_config is before
    assert copied.generation_config.repetition_penalty is None
    assert copied.generation_config.eos_token_id == [3, 4]
    assert all(one is other for one, other in zip(copied.parameters(), llama.parameters(), strict=True))
