"""The next turn of a chat takes up the keys and values of the last, and gives exactly what a fresh run gives."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import selfspec
from helpers import tiny
from selfspec import SelfSpeculative
from selfspec.compat import OUTPUT_CACHE
from selfspec.draft import Drafter, EarlyExit, LayerSkip, LowPrecision
from selfspec.errors import PromptError, UnsupportedOptionError

GREEDY: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
DRAFTS: list[Drafter | None] = [
    None,
    EarlyExit(2),
    LayerSkip(mlp=[3]),
    LowPrecision(4, layers=[2, 3]),
]


@pytest.fixture
def spec(llama: PreTrainedModel) -> SelfSpeculative:
    return selfspec.wrap(llama, EarlyExit(2), draft_length=3)


def next_turn(sequences: Tensor, new: int = 4) -> Tensor:
    return torch.cat([sequences, tiny.prompt(new, len(sequences), seed=9)], 1)


def widths(model: PreTrainedModel) -> list[int]:
    """Notes how many tokens each pass over the embeddings reads."""
    seen: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    return seen


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_turns_of_a_chat_are_what_fresh_runs_give(architecture: str, draft: Drafter | None) -> None:
    model = tiny.BUILDERS[architecture]()
    spec = selfspec.wrap(model, draft, draft_length=3)
    ids, past, computed = tiny.prompt(12), None, widths(model)
    for _ in range(3):
        wanted = model.generate(ids, **GREEDY)
        computed.clear()
        out = spec.generate(ids, cache=past, return_dict_in_generate=True, **GREEDY)
        assert torch.equal(out.sequences, wanted)
        # What the cache holds is not read again.
        # Without a draft the prompt's own pass may read its last token, too.
        assert max(computed) in ((11, 12) if past is None else (4,))
        past = out.cache
        assert past is not None
        assert past.get_seq_length() == wanted.shape[1] - 1
        ids = next_turn(out.sequences)


def test_what_comes_back_holds_what_a_stock_pass_computes(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    spec = selfspec.wrap(model, LayerSkip(attention=[1]), draft_length=3)
    out = spec.generate(tiny.prompt(5, 2), return_dict_in_generate=True, **GREEDY)
    stock = DynamicCache()
    with torch.no_grad():
        model(out.sequences[:, :-1], **{OUTPUT_CACHE: stock})
    assert out.cache is not None
    for own, right in zip(out.cache.layers, stock.layers, strict=True):
        torch.testing.assert_close(own.keys, right.keys)
        torch.testing.assert_close(own.values, right.values)


def test_a_left_padded_batch_continues_from_its_cache(llama: PreTrainedModel, spec: SelfSpeculative) -> None:
    ids, mask = tiny.prompt(8, 3), torch.ones(3, 8, dtype=torch.long)
    mask[0, :5] = mask[2, :2] = 0
    first = spec.generate(ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    ids = next_turn(first.sequences)
    mask = torch.cat([mask, torch.ones(3, ids.shape[1] - 8, dtype=torch.long)], 1)
    computed = widths(llama)
    out = spec.generate(ids, attention_mask=mask, cache=first.cache, **GREEDY)
    assert max(computed) == 4
    assert torch.equal(out.sequences, llama.generate(ids, attention_mask=mask, **GREEDY))


@pytest.mark.parametrize("way", ["wrapper", "transformers"])
def test_a_cache_of_the_callers_own_is_read_and_filled(llama: PreTrainedModel, spec: SelfSpeculative, way: str) -> None:
    """As in `transformers`, whether or not the output is asked for as a whole."""
    past = DynamicCache()
    ids = tiny.prompt(5)
    for _ in range(2):
        wanted = llama.generate(ids, **GREEDY)
        if way == "wrapper":
            out = spec.generate(ids, cache=past, **GREEDY)
            assert out.cache is past
            found = out.sequences
        else:
            found = llama.generate(ids, **{OUTPUT_CACHE: past}, custom_generate=spec, **GREEDY)
        assert torch.equal(found, wanted)
        assert past.get_seq_length() == wanted.shape[1] - 1
        ids = next_turn(wanted)


def test_caches_go_to_and_fro_between_selfspec_and_transformers(llama: PreTrainedModel, spec: SelfSpeculative) -> None:
    stock = llama.generate(tiny.prompt(5), return_dict_in_generate=True, **GREEDY)
    ids = next_turn(stock.sequences)
    wanted = llama.generate(ids, **GREEDY)
    out = spec.generate(ids, cache=getattr(stock, OUTPUT_CACHE), return_dict_in_generate=True, **GREEDY)
    assert torch.equal(out.sequences, wanted)
    ids = next_turn(wanted)
    again = llama.generate(ids, **{OUTPUT_CACHE: out.cache}, **GREEDY)
    assert torch.equal(again, llama.generate(ids, **GREEDY))


def test_rows_that_ended_apart_go_on_from_what_all_have_filled(llama: PreTrainedModel, spec: SelfSpeculative) -> None:
    """Columns behind the end of a shorter row hold padding, which a pass has to read like any other token."""
    ids, ones = tiny.prompt(8, 2), torch.ones(2, 8, dtype=torch.long)
    text = llama.generate(ids, attention_mask=ones, **GREEDY)
    ends = next(int(token) for token in text[0, 10:] if int(token) not in text[1, 8:].tolist())
    out = spec.generate(ids, ones, eos_token_id=ends, return_dict_in_generate=True, **GREEDY)
    assert out.lengths[0] < out.lengths[1]
    assert out.cache is not None
    assert out.cache.get_seq_length() == 8 + out.lengths[0] - 1
    more = next_turn(out.sequences)
    mask = torch.ones_like(more)
    again = spec.generate(more, mask, cache=out.cache, **GREEDY)
    assert torch.equal(again.sequences, llama.generate(more, attention_mask=mask, **GREEDY))


@pytest.mark.parametrize("way", ["wrapper", "transformers"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_turn_may_be_given_by_itself_with_a_mask_over_all(
    llama: PreTrainedModel, spec: SelfSpeculative, way: str, padded: bool
) -> None:
    """As `transformers` takes it: ids of the new columns alone. Padding may stand before them, too."""
    first = spec.generate(tiny.prompt(5, 2), return_dict_in_generate=True, **GREEDY)
    assert first.cache is not None
    ids = torch.cat([first.sequences[:, -1:], tiny.prompt(4, 2, seed=9)], 1)
    mask = torch.ones(2, 13 + 5, dtype=torch.long)
    if padded:
        mask[0, 13:16] = 0
    options = {"attention_mask": mask, OUTPUT_CACHE: first.cache, **GREEDY}
    wanted = llama.generate(ids, **{**options, OUTPUT_CACHE: deepcopy(first.cache)})
    if way == "wrapper":
        found = spec.generate(ids, **options).sequences
    else:
        found = llama.generate(ids, custom_generate=spec, **options)
    assert torch.equal(found, wanted)


def test_samples_are_those_of_a_fresh_run(spec: SelfSpeculative) -> None:
    first = spec.generate(tiny.prompt(5), return_dict_in_generate=True, **GREEDY)
    ids = next_turn(first.sequences)
    sampled: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "seed": 3}
    fresh = spec.generate(ids, **sampled)
    assert torch.equal(spec.generate(ids, cache=first.cache, **sampled).sequences, fresh.sequences)


def test_a_run_that_fails_leaves_the_callers_cache_as_it_was(llama: PreTrainedModel, spec: SelfSpeculative) -> None:
    past = spec.generate(tiny.prompt(5), return_dict_in_generate=True, **GREEDY).cache
    assert past is not None
    before = [layer.keys.clone() for layer in past.layers]
    hook = llama.model.layers[3].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        spec.generate(tiny.prompt(20), cache=past, **GREEDY)
    hook.remove()
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(past.layers, before, strict=True))


def test_nothing_is_kept_for_those_who_do_not_ask(spec: SelfSpeculative) -> None:
    assert spec.generate(tiny.prompt(5), **GREEDY).cache is None
    stream = spec.stream(tiny.prompt(5), return_dict_in_generate=True, **GREEDY)
    next(stream)
    assert stream.output().cache is None
    assert stream.finish().cache is not None


def test_what_cannot_be_taken_over_is_refused_before_anything_runs(
    llama: PreTrainedModel, spec: SelfSpeculative
) -> None:
    past = spec.generate(tiny.prompt(5), return_dict_in_generate=True, **GREEDY).cache
    sliding = tiny.mistral()
    for model in (llama, sliding):
        model.register_forward_pre_hook(lambda module, args: pytest.fail("it ran"))
    static = StaticCache(config=llama.config, max_cache_len=64)
    windows = DynamicCache(config=sliding.config)
    refused = UnsupportedOptionError
    for given, ids, cache, error, words in (
        (spec, tiny.prompt(13), past, PromptError, "holds 13 tokens and input_ids 13"),
        (spec, tiny.prompt(20, 2), past, refused, "holds 1 rows, the batch has 2"),
        (spec, tiny.prompt(20), static, refused, "a cache of type StaticCache"),
        (selfspec.wrap(sliding), tiny.prompt(20), windows, refused, r"DynamicSlidingWindowLayer.*without a config"),
    ):
        with pytest.raises(error, match=words):
            given.generate(ids, cache=cache, **GREEDY)
