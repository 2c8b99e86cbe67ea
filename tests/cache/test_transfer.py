"""What caches hold goes on: to the next turn of a chat, with rows that join and leave, with states and sources."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import LinearAttentionLayer
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

import selfspec
from helpers import tiny
from selfspec import SelfSpeculative
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.shared_layer import RecurrentLayer
from selfspec.cache.source import Source, source_of
from selfspec.compat import OUTPUT_CACHE
from selfspec.draft import Drafter, EarlyExit, LayerSkip, LowPrecision
from selfspec.errors import PromptError, UnsupportedOptionError
from selfspec.model.gated_view import token_by_token

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
    past: Any = None
    ids, computed = tiny.prompt(12), widths(model)
    for _ in range(3):
        wanted = model.generate(ids, **GREEDY)
        computed.clear()
        out = spec.generate(ids, cache=past, return_dict_in_generate=True, **GREEDY)
        assert torch.equal(out.sequences, wanted)
        # What the cache holds is not read again.
        # Without a draft the prompt's own pass may read its last token, too.
        assert max(computed) in ((11, 12) if past is None else (4,))
        past = out.cache
        assert past.get_seq_length() == wanted.shape[1] - 1
        ids = next_turn(out.sequences)


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
    out: Any = spec.generate(ids, ones, eos_token_id=ends, return_dict_in_generate=True, **GREEDY)
    assert out.lengths[0] < out.lengths[1]
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
    past: Any = spec.generate(tiny.prompt(5), return_dict_in_generate=True, **GREEDY).cache
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
    for asked, ids, cache, error, words in (
        (spec, tiny.prompt(13), past, PromptError, "holds 13 tokens and input_ids 13"),
        (spec, tiny.prompt(20, 2), past, refused, "holds 1 rows, the batch has 2"),
        (spec, tiny.prompt(20), static, refused, "a cache of type StaticCache"),
        (selfspec.wrap(sliding), tiny.prompt(20), windows, refused, r"DynamicSlidingWindowLayer.*without a config"),
    ):
        with pytest.raises(error, match=words):
            asked.generate(ids, cache=cache, **GREEDY)


CPU = torch.device("cpu")
DEPTH, HEADS, DIM, LIMIT, SLACK = 2, 2, 3, 40, 4


def filled(length: int, seed: int) -> tuple[SharedCache, Tensor]:
    """A cache of one row with so many tokens, and what it holds, `[layers, heads, tokens, head_dim]`."""
    cache = SharedCache(DEPTH, 1, LIMIT, SLACK, CPU)
    cache.hold(1, max(length, 1))
    held = torch.randn(DEPTH, HEADS, length, DIM, generator=torch.Generator().manual_seed(seed))
    if length:
        for layer in range(DEPTH):
            cache.update(held[layer][None], -held[layer][None], layer)
        cache.commit([length])
    return cache, held


def check(cache: SharedCache, rows: list[Tensor]) -> None:
    assert cache.seq_lens == tuple(row.shape[2] for row in rows)
    for number, layer in enumerate(cache.layers):
        if layer.keys is None:
            assert not any(row.shape[2] for row in rows)
            continue
        assert len(layer.keys) == len(layer.values) == len(rows)
        for index, row in enumerate(rows):
            length = row.shape[2]
            assert torch.equal(layer.keys[index, :, :length], row[number])
            assert torch.equal(layer.values[index, :, :length], -row[number])
            # NaN that a row before left would spoil every attention that looks there.
            assert layer.keys[index, :, length:].isfinite().all()


@settings(max_examples=60)
@given(st.data())
def test_rows_keep_what_they_hold(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 9))
    cache, row = filled(length, 0)
    rows = [row]
    for seed in range(1, data.draw(st.integers(1, 9))):
        if data.draw(st.booleans()) and len(rows) > 1:
            # Rows leave; the last ones may fill their places.
            gone = data.draw(st.sets(st.sampled_from(range(len(rows))), min_size=1, max_size=len(rows) - 1))
            stay = len(rows) - len(gone)
            last = iter([index for index in range(stay, len(rows)) if index not in gone])
            kept = [next(last) if place in gone else place for place in range(stay)]
            # What leaves reaches neither the rows that stay nor those that come.
            for layer in cache.layers:
                if layer.keys is not None:
                    layer.keys[sorted(gone)] = layer.values[sorted(gone)] = torch.nan
            cache.keep(kept)
            rows = [rows[index] for index in kept]
        else:
            other, row = filled(data.draw(st.integers(0, 12)), seed)
            longest = max(each.shape[2] for each in [*rows, row])
            spare = data.draw(st.integers(0, 3))
            cache.hold(len(rows) + 1 + spare, max(longest, 1) + data.draw(st.integers(0, 5)))
            cache.join(other)
            rows.append(row)
        check(cache, rows)


def test_storage_is_what_was_asked_for() -> None:
    cache, _ = filled(5, 0)
    one = cache.nbytes
    assert one == DEPTH * 2 * HEADS * DIM * (5 + SLACK) * 4
    cache.hold(3, 10)
    assert cache.nbytes == 3 * DEPTH * 2 * HEADS * DIM * (10 + SLACK) * 4
    cache.hold(1, 5)
    assert cache.nbytes == one
    assert (cache.cursors.held, cache.cursors.room, cache.cursors.capacity) == (1, 5, 5 + SLACK)


def test_what_does_not_fit_is_refused() -> None:
    cache, _ = filled(5, 0)
    with pytest.raises(ValueError, match="1 rows of 4 tokens"):
        cache.hold(1, 4)
    other, _ = filled(2, 1)
    with pytest.raises(ValueError, match="cannot take"):
        cache.join(other)
    cache.hold(2, 5)
    longer, _ = filled(6, 1)
    with pytest.raises(ValueError, match="cannot take"):
        cache.join(longer)


ROWS, WIDTH = 3, 2


class Summing(torch.nn.Module):
    """A made-up mixer whose output is the sum of all it has read, and which remembers its last inputs."""

    def forward(self, hidden_states: torch.Tensor, cache_params: SharedCache) -> torch.Tensor:
        assert hidden_states.shape[1] == 1, "recurrent modules run one token at a time"
        past = cache_params.layers[0].recurrent_states[0]
        total = hidden_states[:, 0] + (0 if past is None else past)
        cache_params.update_conv_state(hidden_states.transpose(1, 2), 0)
        cache_params.update_recurrent_state(total, 0)
        return total[:, None].clone()


def recurrent_cache() -> SharedCache:
    return SharedCache(1, ROWS, limit=40, slack=4, device=torch.device("cpu"), recurrent={0: LinearAttentionLayer()})


def read(cache: SharedCache, tokens: torch.Tensor) -> torch.Tensor:
    """Sums after each token, `[rows, tokens, width]`."""
    sums: torch.Tensor = token_by_token(Summing(), 0, hidden_states=tokens, cache_params=cache)
    return sums


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(1, 100, (ROWS, count, WIDTH), generator=torch.Generator().manual_seed(seed)).double()


def test_a_pass_resumes_at_the_node_before_it_and_another_begins_again() -> None:
    cache, first, second = recurrent_cache(), tokens(2, 0), tokens(2, 1)
    read(cache, first)
    with cache.reading(2, first=1):
        assert torch.equal(read(cache, second), first.sum(1, keepdim=True) + second.cumsum(1))
    assert torch.equal(read(cache, second), second.cumsum(1))


def test_each_row_settles_at_its_own_token() -> None:
    cache, block, more = recurrent_cache(), tokens(4, 0), tokens(2, 1)
    read(cache, block)
    cache.commit([0, 2, 4])
    settled = torch.stack([torch.zeros(WIDTH, dtype=torch.float64), block[1, :2].sum(0), block[2].sum(0)])
    assert torch.equal(read(cache, more), settled[:, None] + more.cumsum(1))


def test_a_pass_does_not_write_into_the_state_it_starts_from() -> None:
    cache, block = recurrent_cache(), tokens(3, 0)
    read(cache, block)
    cache.commit([3] * ROWS)
    again = [read(cache, tokens(2, 1)) for _ in range(2)]
    assert torch.equal(*again)


def test_rows_that_stay_keep_their_states() -> None:
    cache, block = recurrent_cache(), tokens(3, 0)
    read(cache, block)
    cache.commit([1, 2, 3])
    cache.narrow([2, 0])
    more = tokens(1, 1)[:2]
    settled = torch.stack([block[2].sum(0), block[0, 0]])
    assert torch.equal(read(cache, more), settled[:, None] + more)


def test_a_state_that_was_never_kept_is_missed_rather_than_made_up() -> None:
    cache = recurrent_cache()
    read(cache, tokens(2, 0))
    with cache.reading(1, first=3), pytest.raises(KeyError):
        read(cache, tokens(1, 1))
    with pytest.raises(KeyError):
        cache.commit([4] * ROWS)


def test_the_copies_of_a_round_are_counted() -> None:
    cache = recurrent_cache()
    read(cache, tokens(4, 0))
    layer = cache.layers[0]
    assert isinstance(layer, RecurrentLayer)
    one = 8 * ROWS * WIDTH * (1 + layer.conv_states[0].shape[-1])
    assert cache.state_bytes == 4 * one == cache.nbytes
    cache.commit([4] * ROWS)
    assert cache.state_bytes == 4 * one, "the most at any time"


PLACES, DEPTH = 5, 2


def _read(source: Source, layers: int) -> list[Tensor]:
    made = []
    for layer in range(layers):
        keys, values = torch.randn(2, ROWS, 4, PLACES, 8)
        source.cross.update(keys, values, layer)
        made += [keys, values]
    return made


def _source(mask: Tensor | None) -> Source:
    return source_of(BaseModelOutput(last_hidden_state=torch.randn(ROWS, PLACES, 16)), mask)


def test_a_source_is_no_tensors_before_each_layer_has_read_it() -> None:
    source = _source(None)
    assert source.as_tensors(DEPTH) is None
    _read(source, 1)
    assert source.as_tensors(DEPTH) is None
    whole: Any = source.as_tensors(1)
    assert whole.mask is None
    assert len(whole.cross) == 2


def test_rows_that_are_left_have_their_own() -> None:
    mask = torch.tensor([[1] * 5, [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]])
    source = _source(mask)
    made = _read(source, DEPTH)
    whole: Any = source.as_tensors(DEPTH)
    assert torch.equal(whole.mask, mask.bool()[:, None, None])
    source.narrow([2, 0])
    left: Any = source.as_tensors(DEPTH)
    assert left.mask is not None
    assert torch.equal(left.mask, whole.mask[[2, 0]])
    assert torch.equal(left.states, whole.states[[2, 0]])
    assert all(torch.equal(one, other[[2, 0]]) for one, other in zip(left.cross, made, strict=True))


def test_what_a_pass_reads_of_the_tensors_is_the_same() -> None:
    source = _source(torch.ones(ROWS, PLACES))
    made = _read(source, DEPTH)
    whole: Any = source.as_tensors(DEPTH)
    again = whole.source()
    assert again.beside(source.cross).is_updated == {0: True, 1: True}
    kept = [each for layer in again.cross.layers for each in (layer.keys, layer.values)]
    assert all(torch.equal(one, other) for one, other in zip(kept, made, strict=True))
    assert again.states is source.states


def test_rows_of_nothing_and_outputs_of_more_are_no_tensors() -> None:
    empty = torch.ones(ROWS, PLACES)
    empty[1] = 0
    source = _source(empty)
    _read(source, DEPTH)
    assert source.as_tensors(DEPTH) is None
    source = source_of(BaseModelOutputWithPooling(torch.randn(ROWS, PLACES, 16), torch.randn(ROWS, 16)), None)
    _read(source, DEPTH)
    assert source.as_tensors(DEPTH) is None
