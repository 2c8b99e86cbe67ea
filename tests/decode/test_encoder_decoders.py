"""Encoder-decoders: texts and options are those of `transformers`, and what is not carried is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.generation import GenerateEncoderDecoderOutput

import selfspec
from helpers.drafting import assert_alike
from helpers.encoder_decoders import START, encoder_decoder, joint
from helpers.joints import p_value
from selfspec.draft.prompt_lookup import OwnText, following, last_match
from selfspec.errors import PromptError, UnsupportedModelError, UnsupportedOptionError

NEW = 12
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
DRAFTS = [
    None,
    selfspec.drafts.EarlyExit(1),
    selfspec.drafts.LayerSkip(attention=[1], mlp=[3]),
    selfspec.drafts.LowPrecision(4),
    selfspec.drafts.PromptLookup(shortest=1),
    selfspec.drafts.Recycling(),
    selfspec.drafts.Cascade(selfspec.drafts.PromptLookup(shortest=1), selfspec.drafts.EarlyExit(2)),
]


@pytest.fixture(scope="module", params=["bart", "t5"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return encoder_decoder(request.param)


@pytest.fixture(scope="module")
def inputs() -> dict[str, Any]:
    """Four rows of different lengths, padded on the right, as tokenizers of such models do."""
    ids = torch.randint(3, 50, (4, 11), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row, length in enumerate((11, 7, 4, 9)):
        mask[row, length:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: type(draft).__name__)
def test_greedy_text_is_the_models(
    model: PreTrainedModel, inputs: dict[str, Any], draft: selfspec.drafts.Drafter | None
) -> None:
    if isinstance(draft, selfspec.drafts.Recycling) and model.config.model_type == "t5":
        with pytest.raises(UnsupportedModelError, match="cannot read a tree"):
            selfspec.wrap(model, draft)
        return
    spec = selfspec.wrap(model, draft, draft_length=3)
    assert_alike(spec, **inputs, **GREEDY)
    assert_alike(spec, **{name: value[:1] for name, value in inputs.items()}, **GREEDY)
    for row in range(4):
        used = int(inputs["attention_mask"][row].sum())
        alone = model.generate(inputs["input_ids"][row : row + 1, :used], **GREEDY)
        assert torch.equal(spec.generate(**inputs, **GREEDY).sequences[row], alone[0])


@pytest.mark.parametrize(
    "options",
    [
        {"forced_bos_token_id": 7},
        {"forced_eos_token_id": 9},
        {"decoder_start_token_id": 5},
        {"decoder_start_token_id": [5, 6, 7, 8]},
        {"decoder_input_ids": torch.tensor([[START, 4, 9]] * 4)},
        {"bad_words_ids": [[4], [30, 31]], "no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.5, "repetition_penalty": 1.3},
        {"min_new_tokens": 5, "eos_token_id": [11, 23, 37]},
        {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
        {"suppress_tokens": [3, 4, 5], "begin_suppress_tokens": [6]},
        {"prefix_allowed_tokens_fn": lambda row, ids: [3 + (int(ids[-1]) + row) % 40, 44]},
    ],
    ids=lambda options: " ".join(options),
)
def test_options_mean_what_they_mean_there(
    model: PreTrainedModel, inputs: dict[str, Any], options: dict[str, Any]
) -> None:
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    assert_alike(spec, **inputs, **GREEDY | {"eos_token_id": None} | options)


def test_embeddings_are_what_the_encoder_reads(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    read = model.get_input_embeddings()(inputs["input_ids"]).detach()
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    assert_alike(spec, inputs_embeds=read, attention_mask=inputs["attention_mask"], **GREEDY)


def test_the_whole_output_is_the_models(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    wanted = model.generate(**inputs, **options)
    found = spec.generate(**inputs, **options)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close((found.scores, found.logits), (wanted.scores, wanted.logits), rtol=1e-4, atol=1e-4)
    assert isinstance(found, GenerateEncoderDecoderOutput)
    assert isinstance(found.cache, EncoderDecoderCache)
    torch.testing.assert_close(_held(found.cache), _held(wanted.cache), rtol=1e-4, atol=1e-4)


def _held(cache: Any) -> list[Tensor]:
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return [each for layer in layers for each in (layer.keys, layer.values)]


def test_rows_that_end_leave_with_their_source(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    """Cross-attention of those that are left still reads their own input."""
    plain = model.generate(**inputs, **GREEDY)
    ends = sorted({int(plain[row, 4]) for row in (0, 1)})
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    assert_alike(spec, **inputs, **GREEDY, eos_token_id=ends)


def test_look_ups_find_what_the_encoder_has_read() -> None:
    model = encoder_decoder("bart")
    spec = selfspec.wrap(model, selfspec.drafts.PromptLookup(shortest=1), draft_length=3)
    text = model.generate(torch.tensor([[5, 6, 7]]), **GREEDY)
    apart = spec.generate(torch.tensor([[5, 6, 7]]), **GREEDY)
    assert torch.equal(apart.sequences, text)
    drafts = [chunk.rows[0].draft for chunk in spec.stream(torch.tensor([[START, 40, 41, 42]]), **GREEDY)]
    # The first round reads the source alone. Later ones may copy from it.
    assert drafts[0] == ()
    source = OwnText([START, 40, 41, 42])
    source.extend([9, 40])
    assert source.length == 2
    match = last_match(source.tokens, 1, 5)
    assert match is not None
    assert following(source.tokens, match, 3) == [41, 42, 9]


def test_sampled_texts_have_the_models_joint(model: PreTrainedModel) -> None:
    small = encoder_decoder(model.config.model_type, vocab_size=5)
    source = torch.tensor([[3, 4, 1, 3]])
    spec = selfspec.wrap(small, selfspec.drafts.EarlyExit(1), draft_length=2)
    texts: list[tuple[int, ...]] = []
    judged = 0
    for seed in range(2):
        out = spec.generate(source.repeat(512, 1), max_new_tokens=3, do_sample=True, top_k=0, seed=seed)
        texts += [tuple(row) for row in out.sequences[:, 1:].tolist()]
        judged += out.stats.judged - out.stats.accepted
    assert judged, "nothing was rejected"
    assert p_value(texts, joint({"input_ids": source}, small, 3)) > 1e-3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"decoder_inputs_embeds": torch.zeros(4, 1, 32, dtype=torch.float64)}, "decoder_inputs_embeds"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"cache": EncoderDecoderCache(DynamicCache(), DynamicCache())}, "cache"),
        ({"token_healing": True, "tokenizer": object()}, "token"),
        ({"max_new_tokenz": 3}, "max_new_tokens"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_is_not_carried_is_refused_by_name(
    model: PreTrainedModel, inputs: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2))
    with pytest.raises(UnsupportedOptionError, match=named):
        spec.generate(**inputs, **GREEDY | options)
    if "cache" in options:
        with pytest.raises(UnsupportedOptionError, match="cache beside an encoder"):
            model.generate(**inputs, **GREEDY, **options, custom_generate=spec)


def test_padding_is_refused_where_it_counts_as_text(inputs: dict[str, Any]) -> None:
    spec = selfspec.wrap(encoder_decoder("bart"), selfspec.drafts.EarlyExit(2))
    ids = torch.tensor([[START, 4, 9]] * 4)
    mask = torch.ones_like(ids)
    mask[1, 0] = 0
    with pytest.raises(UnsupportedOptionError, match=r"decoder_attention_mask.*counts padding"):
        spec.generate(**inputs, **GREEDY, decoder_input_ids=ids, decoder_attention_mask=mask)


def test_no_input_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(PromptError, match="no prompt"):
        selfspec.wrap(model).generate(**GREEDY)


def test_rows_that_come_and_go_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedModelError, match="has an encoder"):
        selfspec.wrap(model, selfspec.drafts.EarlyExit(1)).joining_rows()
