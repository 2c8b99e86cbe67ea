"""Inputs beside text: images are read by the stock model, what changes nothing is accepted, all else is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForMultimodalLM, DynamicCache

import selfspec
from helpers import tiny
from helpers.drafting import assert_alike
from helpers.pictures import PICTURED, Pictured, pictured
from helpers.shrunken import shrunken
from selfspec.cache.shared_cache import SharedCache
from selfspec.compat import OUTPUT_CACHE
from selfspec.model.stock_passes import over_cache
from selfspec.serve.row_decoder import RowDecoder

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
QUICK = ("gemma3", "qwen2_vl", "qwen3_5")


def _types() -> list[object]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.contract) for name in PICTURED]


@pytest.mark.parametrize("model_type", _types())
def test_a_prompt_with_an_image_is_continued_as_the_model_does(model_type: str) -> None:
    example = pictured(model_type)
    wanted = example.model.generate(**example.inputs, **OPTIONS)
    assert not torch.equal(wanted, example.model.generate(example.ids, **OPTIONS)), "the image changes nothing"
    for draft in (None, "exit:2", "lookup", "int8"):
        out = selfspec.wrap(example.model, draft, draft_length=3).generate(**example.inputs, **OPTIONS)
        assert out.sequences.tolist() == wanted.tolist(), draft


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_vl"])
def test_images_come_through_transformers_and_streams_too(model_type: str) -> None:
    example = pictured(model_type)
    spec = selfspec.wrap(example.model, "exit:2", draft_length=3)
    wanted = assert_alike(spec, **example.inputs, **OPTIONS)
    streamed = [token for chunk in spec.stream(**example.inputs, **OPTIONS) for token in chunk.tokens]
    assert streamed == wanted[0, example.ids.shape[1] :].tolist()


def _padded(example: Pictured, left: int) -> dict[str, Any]:
    """The prompt, and the same text with an image of other numbers behind some padding."""
    ids = torch.nn.functional.pad(example.ids, (left, 0)).repeat(2, 1)
    ids[0] = torch.cat([torch.randint(3, 40, (left,), generator=torch.Generator().manual_seed(0)), example.ids[0]])
    mask = torch.ones_like(ids)
    mask[1, :left] = 0
    pixels, types = example.inputs["pixel_values"], "mm_token_type_ids" in example.inputs
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.cat([pixels, pixels.flip(0)])}
    inputs["mm_token_type_ids" if types else "token_type_ids"] = (ids == 40).int()
    if types:
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 6], [1, 6, 4]])
    return inputs


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_vl"])
def test_rows_with_images_may_be_padded(model_type: str) -> None:
    example = pictured(model_type)
    inputs = _padded(example, left=5)
    for draft in (None, "exit:2", "lookup"):
        assert_alike(selfspec.wrap(example.model, draft, draft_length=3), **inputs, **OPTIONS)


def test_rows_whose_images_take_different_positions_count_on_from_their_own() -> None:
    example = pictured("qwen2_vl")
    ids = example.ids.repeat(2, 1)
    ids[1, 3:9] = torch.tensor([11, 12, 13, 14, 15, 16])
    inputs = {**example.inputs, "input_ids": ids, "mm_token_type_ids": (ids == 40).int()}
    for draft in (None, "exit:2", "lookup"):
        assert_alike(selfspec.wrap(example.model, draft, draft_length=3), **inputs, **OPTIONS)


def test_rows_that_leave_take_their_offsets_along() -> None:
    cache = SharedCache(1, 3, limit=20, slack=2, device=torch.device("cpu"))
    cache.cursors.offsets = [0, -4, 7]
    cache.narrow([1, 2])
    assert cache.cursors.position_ids(2, 0).tolist() == [[-3, -2], [8, 9]]
    assert cache.cursors.positions(2, 0).tolist() == [[1, 2]]
    cache.keep([1])
    assert cache.cursors.position_ids(1, 0).tolist() == [[8]]
    assert cache.cursors_of([0]).cursors.position_ids(1, 0).tolist() == [[8]]


def test_positions_of_an_earlier_image_do_not_reach_a_text() -> None:
    example = pictured("qwen2_vl")
    spec = selfspec.wrap(example.model, "exit:2", draft_length=3)
    text = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    wanted = example.model.generate(text, **OPTIONS)
    spec.generate(**example.inputs, **OPTIONS)
    assert bool((example.model.model.rope_deltas != 0).any())
    assert spec.generate(text, **OPTIONS).sequences.tolist() == wanted.tolist()


def test_a_cache_that_holds_an_image_is_refused_where_positions_do_not_follow_from_the_text() -> None:
    example = pictured("qwen2_vl")
    spec = selfspec.wrap(example.model, "exit:2", draft_length=3)
    out = spec.generate(**example.inputs, **OPTIONS, return_dict_in_generate=True)
    longer, past = torch.cat([out.sequences, torch.tensor([[7, 8]])], 1), getattr(out, OUTPUT_CACHE or "")
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="position_ids"):
        spec.generate(longer, past_key_values=past, **OPTIONS)


def test_an_image_beside_a_cache_is_refused_by_name() -> None:
    example = pictured("gemma3")
    past = DynamicCache()
    with torch.no_grad():
        example.model(torch.tensor([[5, 6]]), **over_cache(example.model, past))
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match=r"token_type_ids|mm_encoder_outputs"):
        selfspec.wrap(example.model).generate(**example.inputs, past_key_values=past, **OPTIONS)


def test_requests_that_come_and_go_are_text() -> None:
    example = pictured("gemma3")
    beside = {name: value for name, value in example.inputs.items() if name != "input_ids"}
    decoder = RowDecoder(selfspec.wrap(example.model, "exit:2").joining_rows())
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="text alone"):
        decoder.row(tuple(example.ids[0].tolist()), {**beside, **OPTIONS}, None, None, None)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("gemma3", "token_type_ids"), ("gemma4", "mm_token_type_ids"), ("qwen2_vl", "mm_token_type_ids")],
)
def test_token_types_of_text_are_accepted(model_type: str, name: str) -> None:
    model = shrunken(model_type, torch.float32, auto=AutoModelForMultimodalLM)
    prompts = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompts)
    mask[1, :4] = 0
    spec = selfspec.wrap(model, "exit:2", draft_length=3)
    wanted = spec.generate(prompts, mask, **OPTIONS).sequences
    zeros: dict[str, Any] = {name: torch.zeros_like(prompts)}
    assert torch.equal(spec.generate(prompts, mask, **zeros, **OPTIONS).sequences, wanted)
    assert torch.equal(model.generate(prompts, attention_mask=mask, **zeros, **OPTIONS, custom_generate=spec), wanted)


def test_token_types_that_reach_the_tokens_after_the_prompt_are_refused() -> None:
    # GPT-2 adds the embedding of a token's type, of type 0 too.
    spec, prompt = selfspec.wrap(tiny.gpt2(), "exit:2"), tiny.prompt(9)
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match=r"token_type_ids.*after such a prompt"):
        spec.generate(prompt, token_type_ids=torch.zeros_like(prompt), **OPTIONS)


def test_how_many_logits_are_kept_changes_nothing() -> None:
    model, prompt = tiny.llama(), tiny.prompt(9)
    wanted = model.generate(prompt, **OPTIONS).tolist()
    spec = selfspec.wrap(model, "exit:2", draft_length=3)
    for kept in (0, 1, 5):
        assert spec.generate(prompt, logits_to_keep=kept, **OPTIONS).sequences.tolist() == wanted
    refused: list[Any] = [-1, torch.tensor([0])]
    for each in refused:
        with pytest.raises(selfspec.errors.UnsupportedOptionError, match="logits_to_keep"):
            spec.generate(prompt, logits_to_keep=each, **OPTIONS)


def test_what_the_model_cannot_read_is_refused_by_name() -> None:
    example = pictured("qwen2_vl")
    spec = selfspec.wrap(example.model, "exit:2")
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="mm_encoder_outputs"):
        spec.generate(example.ids, mm_encoder_outputs={"image": torch.ones(1, 1, 32)}, **OPTIONS)
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="pixel_value"):
        spec.generate(example.ids, pixel_value=example.inputs["pixel_values"], **OPTIONS)
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="labels"):
        spec.generate(example.ids, labels=example.ids, **OPTIONS)
