"""Whisper through its own `generate`: segments, timestamps and fallbacks are those of `transformers`."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, PreTrainedModel

import selfspec
from helpers.drafting import assert_alike
from helpers.encoder_decoders import EOS, FRAMES, MELS, NO_TIMESTAMPS, START, encoder_decoder, whisper
from selfspec.decode.generation import Transcript
from selfspec.errors import PromptError, UnsupportedOptionError

DRAFTS = [None, selfspec.drafts.EarlyExit(2), selfspec.drafts.LowPrecision(), selfspec.drafts.Recycling()]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return whisper()


def features(rows: int, frames: int = FRAMES) -> Tensor:
    return torch.randn(rows, MELS, frames, generator=torch.Generator().manual_seed(rows))


SHORT: dict[str, Any] = {"input_features": features(3)}
LONG: dict[str, Any] = {
    "input_features": features(2, 3 * FRAMES),
    "attention_mask": torch.tensor([[1] * 3 * FRAMES, [1] * (2 * FRAMES + 7) + [0] * (FRAMES - 7)]),
    "return_timestamps": True,
}


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: type(draft).__name__)
@pytest.mark.parametrize(
    "inputs",
    [
        SHORT,
        {**SHORT, "return_timestamps": True},
        LONG,
        {**LONG, "condition_on_prev_tokens": True},
        {**LONG, "prompt_ids": torch.tensor([4, 9, 10])},
        {
            **LONG,
            "temperature": 0.0,
            "logprob_threshold": -2.0,
            "no_speech_threshold": 0.3,
            "compression_ratio_threshold": 1.35,
        },
    ],
    ids=["short", "timestamps", "long", "condition", "prompt", "thresholds"],
)
def test_text_is_the_models(model: PreTrainedModel, draft: selfspec.drafts.Drafter | None, inputs: Any) -> None:
    spec = selfspec.wrap(model, draft, draft_length=3)
    assert_alike(spec, **inputs)
    found = spec.generate(**inputs)
    assert found.lossless
    assert found.stats.new_tokens >= sum(found.lengths) > 0


def test_the_whole_output_has_its_items(model: PreTrainedModel) -> None:
    options: dict[str, Any] = {**SHORT, "return_dict_in_generate": True, "output_scores": True}
    wanted = model.generate(**options)
    found: Any = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3).generate(**options)
    assert isinstance(found, type(wanted))
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-4, atol=1e-4)


@pytest.mark.contract
def test_a_fallback_draws_by_the_seed(model: PreTrainedModel) -> None:
    """Every segment fails the threshold, so that each is drawn again, with noise of its own."""
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    options: dict[str, Any] = {**LONG, "temperature": (0.0, 0.8), "logprob_threshold": 10.0}
    texts = [spec.generate(**options, seed=seed).sequences.tolist() for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("draft", DRAFTS[:2], ids=lambda draft: type(draft).__name__)
# Of transformers' own code.
@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
@pytest.mark.parametrize("more", [SHORT, LONG, {**LONG, "return_segments": True}], ids=["short", "long", "segments"])
def test_timestamps_of_tokens_are_the_models(
    model: PreTrainedModel, draft: selfspec.drafts.Drafter | None, more: dict[str, Any]
) -> None:
    """They are made of attentions, which one pass over the whole text gives as those over one token each do."""
    options: dict[str, Any] = {**more, "return_timestamps": True, "return_token_timestamps": True}
    kernel = model.config._attn_implementation
    found = selfspec.wrap(model, draft, draft_length=3).generate(**options)
    assert model.config._attn_implementation == kernel
    try:
        wanted = model.generate(**options)
    finally:
        # transformers sets it, and leaves it so.
        model.config._attn_implementation = kernel
    assert isinstance(found, Transcript)
    assert torch.equal(found.sequences, wanted["sequences"])
    assert found.token_timestamps is not None
    torch.testing.assert_close(found.token_timestamps, wanted["token_timestamps"])
    for ours, theirs in zip(found.segments or [], wanted.get("segments", []), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one["start"], one["end"]) == (other["start"], other["end"])
            assert one["tokens"].tolist() == other["tokens"].tolist()
            torch.testing.assert_close(one["token_timestamps"], other["token_timestamps"])


# Of transformers' own code.
@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
def test_timestamps_of_tokens_in_two_threads_leave_the_model_as_it_was() -> None:
    model = whisper()
    kernel, spec = model.config._attn_implementation, selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    begun, ended = threading.Barrier(2), threading.Event()
    seen: list[str] = []

    class Overlapping(LogitsProcessor):
        """The second call begins within the first one, and ends after it."""

        stateless = True
        met = False

        def __init__(self, outlasts: bool) -> None:
            self.outlasts = outlasts

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            if not self.met:
                self.met = True
                begun.wait(60)
                seen.append(model.config._attn_implementation)
                assert not self.outlasts or ended.wait(60)
            return scores

    def run(outlasts: bool) -> Tensor:
        found: Tensor = spec.generate(
            **SHORT, return_token_timestamps=True, logits_processor=[Overlapping(outlasts)]
        ).sequences
        if not outlasts:
            ended.set()
        return found

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, (False, True))
    assert torch.equal(first, second)
    assert {*seen, model.config._attn_implementation} == {kernel}
    assert not any(module._forward_hooks for module in model.modules())


def test_attentions_for_their_own_sake_are_refused_by_name(model: PreTrainedModel) -> None:
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2))
    wanted: dict[str, Any] = {**SHORT, "return_dict_in_generate": True, "output_attentions": True}
    for options in (wanted, {**wanted, "return_token_timestamps": True}):
        with pytest.raises(UnsupportedOptionError, match="output_attentions"):
            spec.generate(**options)


def test_a_context_is_that_of_the_decoder() -> None:
    model = encoder_decoder("whisper", torch.float32, max_target_positions=10, max_position_embeddings=4)
    options: dict[str, Any] = {"decoder_input_ids": torch.tensor([[START]]), "do_sample": False}
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    found = spec.generate(features(1), **options, max_new_tokens=9)
    assert torch.equal(found.sequences, GenerationMixin.generate(model, features(1), **options, max_new_tokens=9))
    with pytest.raises(PromptError, match="context of 10"):
        spec.generate(features(1), **options, max_new_tokens=10)


def test_a_piece_is_streamed(model: PreTrainedModel) -> None:
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    with pytest.raises(UnsupportedOptionError, match=r"stream.*decoder_input_ids"):
        spec.stream(features(1))
    text = model.generate(features(1)[:, :, :FRAMES], max_new_tokens=8)[0].tolist()
    start = torch.tensor([[START, NO_TIMESTAMPS]])
    rounds = spec.stream(features(1), decoder_input_ids=start, max_new_tokens=8, begin_suppress_tokens=[7, EOS])
    streamed = [token for chunk in rounds for token in chunk.tokens]
    assert len(streamed) == 8
    assert text[:8] == streamed
    with pytest.raises(UnsupportedOptionError, match="streamer"):
        spec.generate(features(1), streamer=Mock())
