"""A pipeline of `transformers` over a wrapper, or told of one, gives what it gives over the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, pipeline

import selfspec
from helpers import encoder_decoders, tiny

TEXTS = ["some text", "and a longer one"]
GREEDY: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny.llama(vocab_size=256)


@pytest.fixture
def spec(model: PreTrainedModel) -> selfspec.SelfSpeculative:
    return selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)


def made(model: Any) -> Any:
    return pipeline("text-generation", model=model, tokenizer=tiny.tokenizer())


@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        {**GREEDY, "batch_size": 2},
        {**GREEDY, "return_full_text": False},
        {**GREEDY, "return_dict_in_generate": True, "output_scores": True},
        {**GREEDY, "stop_sequence": "a"},
        {"generation_config": GenerationConfig(max_new_tokens=4, do_sample=False)},
        {"max_new_tokens": 9, "do_sample": True, "top_k": 1, "num_return_sequences": 2},
    ],
    ids=lambda options: " ".join(options),
)
def test_a_pipeline_gives_the_models_text(
    model: PreTrainedModel, spec: selfspec.SelfSpeculative, options: dict[str, Any]
) -> None:
    wanted = made(model)(TEXTS, **options)
    assert made(spec)(TEXTS, **options) == wanted


def test_a_pipeline_takes_a_wrapper(model: PreTrainedModel, spec: selfspec.SelfSpeculative) -> None:
    plain = made(model)
    assert plain(TEXTS, custom_generate=spec, **GREEDY) == plain(TEXTS, **GREEDY)


def test_a_pipeline_is_shown_and_saved(spec: selfspec.SelfSpeculative, tmp_path: Any) -> None:
    whole = made(spec)
    assert "'model': 'SelfSpeculative', 'dtype': 'float64', 'device': 'cpu'" in repr(whole)
    whole.save_pretrained(tmp_path)
    assert {"model.safetensors", "tokenizer.json", "custom_generate"} <= {path.name for path in tmp_path.iterdir()}


def test_a_pipeline_moves_the_model(spec: selfspec.SelfSpeculative) -> None:
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="device 'meta' computes nothing"):
        pipeline("text-generation", model=spec, tokenizer=tiny.tokenizer(), device=torch.device("meta"))
    assert spec.device == spec.model.device == torch.device("cpu")


SOUND = np.random.default_rng(0).normal(size=40_000).astype(np.float32)
ONE_BEAM: dict[str, Any] = {"num_beams": 1, "max_new_tokens": 9}


def listening(model: Any) -> Any:
    return pipeline(
        "automatic-speech-recognition",
        model=model,
        tokenizer=encoder_decoders.tokenizer(),
        feature_extractor=encoder_decoders.feature_extractor(),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_timestamps": "word"},
        {"chunk_length_s": 1, "return_timestamps": "word"},
        {"chunk_length_s": 1, "stride_length_s": 0.2, "batch_size": 2, "return_timestamps": True},
    ],
    ids=str,
)
def test_a_pipeline_of_speech_gives_the_models_text(options: dict[str, Any]) -> None:
    # Of several pieces only with timestamps.
    sound = SOUND if "return_timestamps" in options or "chunk_length_s" in options else SOUND[:12_000]
    model = encoder_decoders.whisper()
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    found = listening(spec)(sound.copy(), generate_kwargs=ONE_BEAM, **options)
    told = listening(model)(sound.copy(), generate_kwargs={**ONE_BEAM, "custom_generate": spec}, **options)
    assert told == found
    assert listening(model)(sound.copy(), generate_kwargs=ONE_BEAM, **options) == found


def test_a_pipeline_of_speech_that_asks_for_beams_is_refused() -> None:
    spec = selfspec.wrap(encoder_decoders.whisper(), selfspec.drafts.EarlyExit(2))
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="num_beams=5"):
        listening(spec)(SOUND[:12_000])
