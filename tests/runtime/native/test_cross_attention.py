"""Native programs of decoders that read what an encoder has read: the stock model's texts, sources of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers.captures import wrapped
from helpers.encoder_decoders import FRAMES, MELS, encoder_decoder
from selfspec.runtime import Native

pytestmark = pytest.mark.kernels

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
# Models this small say one thing for ever.
UNLIKE: dict[str, Any] = {**GREEDY, "repetition_penalty": 3.0}
DRAFTS: dict[str, selfspec.drafts.Drafter | None] = {
    "plain": None,
    "exit": selfspec.drafts.EarlyExit(1),
    "sublayers": selfspec.drafts.LayerSkip(attention=[1], mlp=[2]),
    "int8": selfspec.drafts.LowPrecision(),
    "recycle": selfspec.drafts.Recycling(),
    "8-bit cache": selfspec.drafts.CacheInBits(selfspec.drafts.LowPrecision(), 8),
}
TYPES = ("whisper", "bart", "marian")


def _model(model_type: str) -> PreTrainedModel:
    made = encoder_decoder(model_type, torch.float32)
    # Small weights would hide a wrong place or a wrong row.
    with torch.no_grad():
        for weight in made.get_decoder().parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
    return made


def _inputs(model: PreTrainedModel, lengths: list[int]) -> dict[str, Any]:
    """What an encoder reads of some rows, in pieces of one length where it takes no mask."""
    generator = torch.Generator().manual_seed(sum(lengths))
    if model.config.model_type == "whisper":
        return {"input_features": torch.randn(len(lengths), MELS, FRAMES, generator=generator)}
    ids = torch.randint(3, 50, (len(lengths), max(lengths)), generator=generator)
    mask = torch.tensor([[int(place < length) for place in range(max(lengths))] for length in lengths])
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("model_type", TYPES)
def test_greedy_text_is_the_stock_models(model_type: str, draft: str) -> None:
    model = _model(model_type)
    spec = wrapped(model, Native(after=0), DRAFTS[draft])
    for lengths in ([7], [4, 7, 6], [12], [3, 11, 9]):
        inputs = _inputs(model, lengths)
        for options in (GREEDY, UNLIKE):
            wanted = model.generate(**inputs, **options)
            assert torch.equal(spec.generate(**inputs, **options).sequences, wanted)
    assert {1, 3} <= {kind.rows for kind in spec.programs.proved}
    assert not spec.programs.refusals


@pytest.mark.parametrize("model_type", ["bart", "marian"])
def test_a_source_of_another_length_has_no_programs_of_its_own(model_type: str) -> None:
    model = _model(model_type)
    spec = wrapped(model, Native(after=0), selfspec.drafts.EarlyExit(1))
    for lengths in ([6, 4], [17, 9], [2, 3]):
        spec.generate(**_inputs(model, lengths), **GREEDY)
    made = {kind: spec.programs._candidates[kind].program for kind in spec.programs.proved}
    inputs = _inputs(model, [23, 14])
    assert torch.equal(spec.generate(**inputs, **GREEDY).sequences, model.generate(**inputs, **GREEDY))
    assert made
    assert made.items() <= {kind: each.program for kind, each in spec.programs._candidates.items()}.items()


def test_rows_that_end_take_what_they_read_with_them() -> None:
    """Rows that are left read their own source, masked or not."""
    model = _model("bart")
    inputs = _inputs(model, [9, 4, 7, 6])
    whole = model.generate(**inputs, **UNLIKE)
    # Each of these ends some row early, the first among them.
    for place in (2, 4, 6):
        options = {**UNLIKE, "eos_token_id": int(whole[0, place])}
        spec = wrapped(model, Native(after=0), selfspec.drafts.EarlyExit(2))
        for _ in range(2):
            assert torch.equal(spec.generate(**inputs, **options).sequences, model.generate(**inputs, **options))
        assert len({kind.rows for kind in spec.programs.proved}) > 1
        assert not spec.programs.refusals


def test_a_row_that_is_all_padding_runs_on_the_stock_modules() -> None:
    model = _model("bart")
    inputs = _inputs(model, [5, 0])
    spec = wrapped(model, Native(after=0))
    spec.generate(**inputs, **GREEDY)
    assert not spec.programs.proved
    assert not spec.programs.refusals


def test_positions_that_are_relative_run_on_the_stock_modules() -> None:
    model = encoder_decoder("t5", torch.float32)
    spec = wrapped(model, Native(after=0), selfspec.drafts.EarlyExit(1))
    ids = torch.tensor([[4, 9, 12]])
    assert torch.equal(spec.generate(ids, **GREEDY).sequences, model.generate(ids, **GREEDY))
    assert not spec.programs.proved
