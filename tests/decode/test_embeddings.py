"""Prompts that are not text alone: embeddings, soft prompts, positions, images; what else is given beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation import LogitsProcessor

import selfspec
from helpers import tiny
from helpers.drafting import assert_alike
from helpers.saved_folders import installed  # noqa: F401 - a fixture
from helpers.shrunken import PICTURED, Pictured, pictured, shrunken
from selfspec.cache.masks import smallest_window
from selfspec.cache.shared_cache import SharedCache
from selfspec.compat import OUTPUT_CACHE
from selfspec.draft import Drafter
from selfspec.errors import PromptError, UnsupportedOptionError
from selfspec.model.stock_passes import over_cache
from selfspec.serve.row_decoder import RowDecoder
from selfspec.serve.row_request import RowRequest

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
DRAFTS: list[Drafter | None] = [
    None,
    selfspec.drafts.EarlyExit(2),
    selfspec.drafts.LowPrecision(),
    selfspec.drafts.PromptLookup(shortest=1),
]
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]])


def embedded(model: PreTrainedModel, length: int = 7, rows: int = 1) -> Tensor:
    """Embeddings that are no token's, `[rows, length, hidden]`."""
    weight: Tensor = model.get_input_embeddings().weight
    noise = torch.randn(rows, length, weight.shape[1], generator=torch.Generator().manual_seed(5), dtype=weight.dtype)
    return noise * weight.std()


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_a_left_padded_batch_of_embeddings(architecture: str, draft: Drafter | None) -> None:
    model = tiny.BUILDERS[architecture]()
    options = {"inputs_embeds": embedded(model, rows=3), "attention_mask": MASK, **GREEDY}
    assert assert_alike(selfspec.wrap(model, draft, draft_length=3), **options).shape == (3, 12)


@pytest.mark.parametrize("columns", [7, 5], ids=["as long", "shorter"])
def test_ids_beside_embeddings_are_the_text_that_is_added_to(llama: PreTrainedModel, columns: int) -> None:
    """They come back before the new tokens, and processors and look-ups read them; the model does not."""
    ids = tiny.prompt(columns, 3)
    options = {
        "inputs_embeds": embedded(llama, rows=3),
        "attention_mask": MASK,
        "repetition_penalty": 1.7,
        "no_repeat_ngram_size": 2,
        **GREEDY,
    }
    found = assert_alike(selfspec.wrap(llama, "lookup+exit:2", draft_length=3), inputs=ids, **options)
    assert torch.equal(found[:, :columns], ids)


class Shown(LogitsProcessor):
    """Notes the ids it is shown, and forbids the token that follows from their number."""

    def __init__(self) -> None:
        self.ids: set[tuple[int, ...]] = set()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.ids |= {tuple(row) for row in input_ids.tolist()}
        scores = scores.clone()
        scores[:, input_ids.shape[1] % scores.shape[1]] = -torch.inf
        return scores


def test_processors_see_what_transformers_shows_them(llama: PreTrainedModel) -> None:
    stock, own = Shown(), Shown()
    embeddings = embedded(llama)
    wanted = llama.generate(inputs_embeds=embeddings, logits_processor=LogitsProcessorList([stock]), **GREEDY)
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=3)
    found = spec.generate(inputs_embeds=embeddings, logits_processor=LogitsProcessorList([own]), **GREEDY)
    assert torch.equal(found.sequences, wanted)
    assert () in stock.ids
    assert stock.ids <= own.ids


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
@pytest.mark.parametrize(
    "options", [{"max_length": 9}, {"max_new_tokens": 1}, {"eos_token_id": [*range(0, 50, 7)]}, {}], ids=str
)
def test_lengths_mean_what_they_mean_in_transformers(llama: PreTrainedModel, options: dict[str, Any]) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=3)
    assert_alike(spec, inputs_embeds=embedded(llama), do_sample=False, pad_token_id=0, **options)


def test_scores_logits_and_returned_sequences(llama: PreTrainedModel) -> None:
    embeddings = embedded(llama, rows=2)
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **GREEDY}
    stock = llama.generate(inputs_embeds=embeddings, **asked)
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=3)
    out = spec.generate(inputs_embeds=embeddings, **asked)
    torch.testing.assert_close((out.scores, out.logits), (stock.scores, stock.logits))
    sampled = spec.generate(inputs_embeds=embeddings, max_new_tokens=6, do_sample=True, top_k=1, num_return_sequences=3)
    assert torch.equal(sampled.sequences, stock.sequences[:, :6].repeat_interleave(3, 0))


def test_embeddings_of_tokens_are_the_tokens(llama: PreTrainedModel) -> None:
    """Samples too, with the same seed: the first round draws from the same distribution at the same place."""
    ids = tiny.prompt(7, 3)
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=3)
    for options in (GREEDY, {"max_new_tokens": 12, "do_sample": True, "seed": 1, "accept": "coupled"}):
        wanted = spec.generate(ids, MASK, **options).sequences
        found = spec.generate(inputs_embeds=llama.get_input_embeddings()(ids), attention_mask=MASK, **options).sequences
        assert torch.equal(found, wanted[:, 7:])


def test_a_cache_continues_from_embeddings(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=3)
    first = embedded(llama)
    out: Any = spec.generate(inputs_embeds=first, return_dict_in_generate=True, **GREEDY)
    assert out.cache.get_seq_length() == 7 + 11
    more = torch.cat([out.sequences, tiny.prompt(4)], 1)
    whole = torch.cat([first, llama.get_input_embeddings()(more)], 1)
    wanted = llama.generate(inputs_embeds=whole, **GREEDY)
    again = spec.generate(inputs_embeds=whole, cache=out.cache, **GREEDY)
    assert torch.equal(again.sequences, wanted)


def test_the_drafts_of_later_rounds_are_used(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.LayerSkip(mlp=[3]), draft_length=3)
    stats = spec.generate(inputs_embeds=embedded(llama), **GREEDY).stats
    assert stats.rounds < 12
    stream = spec.stream(inputs_embeds=embedded(llama), **GREEDY)
    assert [next(stream).steps for _ in range(2)] == [0, 3]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"inputs_embeds": torch.zeros(1, 5, 32)}, "must be a tensor of torch.float64"),
        ({"inputs_embeds": torch.zeros(1, 5, 31, dtype=torch.float64)}, r"hidden|\[batch, prompt, 32\]"),
        ({"inputs_embeds": torch.zeros(5, 32, dtype=torch.float64)}, r"got shape \[5, 32\]"),
        ({"inputs_embeds": torch.zeros(1, 0, 32, dtype=torch.float64)}, r"got shape \[1, 0, 32\]"),
        ({"inputs_embeds": "text"}, "got 'text'"),
        ({"attention_mask": torch.ones(2, 6)}, r"attention_mask has shape \[2, 6\], inputs_embeds \[2, 7\]"),
        ({"input_ids": tiny.prompt(7, 3)}, "input_ids hold 3 rows, inputs_embeds 2"),
        ({"max_new_tokens": 122}, "context of 128"),
    ],
    ids=["dtype", "width", "rank", "empty", "text", "mask", "rows", "length"],
)
def test_what_are_no_embeddings_of_the_model_is_refused(
    llama: PreTrainedModel, options: dict[str, Any], match: str
) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=3)
    llama.register_forward_pre_hook(lambda module, args: pytest.fail("it ran"))
    with pytest.raises(PromptError, match=match):
        spec.generate(**{"inputs_embeds": embedded(llama, rows=2), **GREEDY, **options})


# Positions.


HOLES = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 1, 1, 1], [1, 0, 1, 1, 0, 1, 1]])
OWN = torch.tensor([[0, 0, 3, 4, 9, 9, 11]]) + torch.tensor([[0], [7], [2]])


@pytest.mark.parametrize("draft", ["exit:2", "lookup", "suffix+recycle+exit:2", "int8", None])
@pytest.mark.parametrize(
    "given",
    [
        {"attention_mask": HOLES},
        {"attention_mask": MASK, "position_ids": (MASK.cumsum(1) + 4).clamp(min=0)},
        {"attention_mask": HOLES, "position_ids": OWN},
        {"attention_mask": torch.ones_like(HOLES), "position_ids": OWN},
    ],
    ids=["holes", "shifted", "both", "own"],
)
def test_holes_in_masks_and_positions_of_ones_own_are_read_as_the_model_reads_them(
    architecture: str, given: dict[str, Tensor], draft: str | None
) -> None:
    model, ids = tiny.BUILDERS[architecture]().double(), tiny.prompt(7, 3)
    options = {**GREEDY, "max_new_tokens": 14, **given}
    spec = selfspec.wrap(model, draft, draft_length=None if draft is None else 3)
    if bool((given["attention_mask"].diff(dim=1) < 0).any()) and smallest_window(model.config) is not None:
        with pytest.raises(UnsupportedOptionError, match="zeros after ones"):
            spec.generate(ids, **options)
        return
    assert_alike(spec, inputs=ids, **options)
    drawn = {**options, "do_sample": True, "seed": 3, "accept": "coupled"}
    plain = selfspec.wrap(model, None).generate(ids, **drawn)
    assert torch.equal(spec.generate(ids, **drawn).sequences, plain.sequences)


def test_a_cache_of_a_text_with_holes_is_continued(llama: PreTrainedModel) -> None:
    spec, ids = selfspec.wrap(llama, "exit:2", draft_length=3), tiny.prompt(7, 3)
    out = spec.generate(ids, attention_mask=HOLES, return_dict_in_generate=True, **GREEDY)
    longer = torch.cat([out.sequences, tiny.prompt(3, 3, seed=4)], 1)
    mask = torch.cat([HOLES, torch.ones(3, longer.shape[1] - 7, dtype=torch.long)], 1)
    found = spec.generate(longer, attention_mask=mask, past_key_values=out.cache, **GREEDY).sequences
    assert torch.equal(found, llama.generate(longer, attention_mask=mask, **GREEDY))


def test_positions_beyond_the_context_or_of_other_tokens_are_refused(llama: PreTrainedModel) -> None:
    spec, positions = selfspec.wrap(llama, None), torch.arange(120, 125)[None]
    assert spec.generate(tiny.prompt(5), position_ids=positions, **{**GREEDY, "max_new_tokens": 3}).lengths == (3,)
    with pytest.raises(PromptError, match="context of 128"):
        spec.generate(tiny.prompt(5), position_ids=positions, **{**GREEDY, "max_new_tokens": 4})
    for other in (torch.arange(4)[None], torch.arange(5)):
        for call in (spec.generate, partial(llama.generate, custom_generate=spec)):
            with pytest.raises(UnsupportedOptionError, match=r"position_ids.*attention mask"):
                call(tiny.prompt(5), position_ids=other, **GREEDY)


VIRTUAL = 3
PADDED = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])

Inputs = dict[str, Any]


def with_columns(inputs: Inputs, rows: int) -> None:
    if inputs.get("attention_mask") is not None:
        inputs["attention_mask"] = torch.cat([torch.ones(rows, VIRTUAL), inputs["attention_mask"]], 1)


def before_embeddings(model: PreTrainedModel, inputs: Inputs) -> None:
    """Virtual tokens in front of the prompt's, and no word on positions."""
    rows = len(inputs["input_ids"])
    with_columns(inputs, rows)
    inputs["position_ids"] = None
    if inputs[OUTPUT_CACHE].get_seq_length() == 0:
        embeddings = model.get_input_embeddings()
        virtual = embeddings(tiny.prompt(VIRTUAL, seed=4)).expand(rows, -1, -1) * 1.5
        inputs["inputs_embeds"] = torch.cat([virtual, embeddings(inputs["input_ids"])], 1)
        inputs["input_ids"] = None


def before_keys(model: PreTrainedModel, inputs: Inputs) -> None:
    """Keys and values of virtual tokens in an otherwise empty cache."""
    rows = len(inputs["input_ids"])
    with_columns(inputs, rows)
    inputs["position_ids"] = inputs["position_ids"] + VIRTUAL
    if inputs[OUTPUT_CACHE].get_seq_length() == 0:
        inputs[OUTPUT_CACHE] = DynamicCache()
        model.model(tiny.prompt(VIRTUAL, seed=4).expand(rows, -1), **{OUTPUT_CACHE: inputs[OUTPUT_CACHE]})


@contextmanager
def prompted(model: PreTrainedModel, change: Callable[[PreTrainedModel, Inputs], None]) -> Iterator[None]:
    own = model.prepare_inputs_for_generation

    def prepare(*args: Any, **kwargs: Any) -> Inputs:
        inputs: Inputs = own(*args, **kwargs)
        change(model, inputs)
        return inputs

    model.prepare_inputs_for_generation = prepare
    try:
        yield
    finally:
        model.prepare_inputs_for_generation = own


@pytest.mark.parametrize(
    "draft", [None, selfspec.drafts.EarlyExit(2), selfspec.drafts.PromptLookup(shortest=1)], ids=str
)
@pytest.mark.parametrize("change", [before_embeddings, before_keys])
def test_a_soft_prompt_is_read(
    llama: PreTrainedModel, change: Callable[[PreTrainedModel, Inputs], None], draft: Any
) -> None:
    spec, ids = selfspec.wrap(llama, draft, draft_length=3), tiny.prompt(5, 2)
    base = llama.generate(ids, **GREEDY)
    with prompted(llama, change):
        assert not torch.equal(assert_alike(spec, inputs=ids, **GREEDY), base)
    # What stays on the model is its own method.
    assert torch.equal(llama.generate(ids, custom_generate=spec, **GREEDY), base)


def test_a_saved_folder_reads_a_soft_prompt(tmp_path: Path) -> None:
    stock = tiny.llama()
    selfspec.wrap(stock, selfspec.drafts.EarlyExit(2), draft_length=3).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    with prompted(stock, before_embeddings), prompted(model, before_embeddings):
        wanted: Tensor = stock.generate(tiny.prompt(5, 2), **GREEDY)
        assert torch.equal(model.generate(tiny.prompt(5, 2), **GREEDY), wanted)


def test_padding_behind_a_prefix_is_left_out(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=3)
    with prompted(llama, before_keys):
        assert_alike(spec, inputs=tiny.prompt(5, 2), attention_mask=PADDED, **GREEDY)


@pytest.mark.parametrize(
    ("architecture", "change", "match"),
    [("llama", before_embeddings, "before padded rows"), ("mistral", before_keys, "padding between")],
)
def test_padding_that_would_count_as_text_is_refused(
    architecture: str, change: Callable[[PreTrainedModel, Inputs], None], match: str
) -> None:
    model = tiny.BUILDERS[architecture]()
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    with prompted(model, change), pytest.raises(UnsupportedOptionError, match=match):
        model.generate(tiny.prompt(5, 2), attention_mask=PADDED, custom_generate=spec, **GREEDY)


def test_a_filled_cache_beside_a_soft_prompt_is_refused(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=3)
    with prompted(llama, before_keys):
        out = llama.generate(tiny.prompt(5), custom_generate=spec, return_dict_in_generate=True, **GREEDY)
        assert out.cache.get_seq_length() == VIRTUAL + 5 + 11
        more = torch.cat([out.sequences, tiny.prompt(3)], 1)
        with pytest.raises(UnsupportedOptionError, match="a cache beside a soft prompt"):
            llama.generate(more, **{OUTPUT_CACHE: out.cache}, custom_generate=spec, **GREEDY)


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


def _padded(example: Pictured, left: int = 5) -> dict[str, Any]:
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


def _in_one_row(example: Pictured) -> dict[str, Any]:
    """The prompt, and one with words in place of the image, whose positions count on from their own."""
    ids = example.ids.repeat(2, 1)
    ids[1, 3:9] = torch.tensor([11, 12, 13, 14, 15, 16])
    return {**example.inputs, "input_ids": ids, "mm_token_type_ids": (ids == 40).int()}


@pytest.mark.parametrize(
    ("model_type", "rows"), [("gemma3", _padded), ("qwen2_vl", _padded), ("qwen2_vl", _in_one_row)]
)
def test_rows_with_images(model_type: str, rows: Callable[[Pictured], dict[str, Any]]) -> None:
    example = pictured(model_type)
    for draft in (None, "exit:2", "lookup"):
        assert_alike(selfspec.wrap(example.model, draft, draft_length=3), **rows(example), **OPTIONS)


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
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="a row takes no"):
        decoder.row(RowRequest(tuple(example.ids[0].tolist()), 8, beside))


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
