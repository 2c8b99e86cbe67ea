"""Keys and values on the host are the very numbers; in 8 bits they are near."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.any_rounds import AnyRounds, any_rounds
from helpers.captures import DRAFTS, StandIn, wrapped
from helpers.copies import MASK, PROMPTS, stand_in_device
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.shared_layer import CacheKind
from selfspec.control import FixedLength
from selfspec.decode.generation import Limits
from selfspec.errors import UnsupportedModelError, UnsupportedOptionError
from selfspec.placement.drafts import placement_of

CPU = torch.device("cpu")

TestAnyRoundsOnTheHost = pytest.mark.contract(any_rounds(AnyRounds, 10, kept="host"))
TestManyRoundsOnTheHost = pytest.mark.contract(any_rounds(AnyRounds, 60, steps=50, kept="host"))


def kept(model: PreTrainedModel, cache: CacheKind, draft: Any = None, length: Any = None) -> selfspec.SelfSpeculative:
    spec = selfspec.wrap(model, draft, draft_length=length)
    spec.limits = Limits(1000, 1000, cache)
    return spec


@pytest.mark.parametrize("cache", ["host", "int8"])
@pytest.mark.parametrize(
    ("draft", "length"),
    [("exit:2", 3), ("lookup", 4), (selfspec.drafts.EarlyExit(2), FixedLength(3, nodes=8))],
    ids=str,
)
def test_drafts_give_what_plain_decoding_over_the_same_cache_gives(cache: CacheKind, draft: Any, length: Any) -> None:
    model = tiny.llama()
    found = kept(model, cache, draft, length).generate(PROMPTS, MASK, max_new_tokens=70, do_sample=False)
    wanted = kept(model, cache).generate(PROMPTS, MASK, max_new_tokens=70, do_sample=False)
    assert torch.equal(found.sequences, wanted.sequences)
    assert found.lossless == wanted.lossless == (cache == "host")
    if cache == "host":
        exact = selfspec.wrap(model).generate(PROMPTS, MASK, max_new_tokens=70, do_sample=False)
        assert torch.equal(found.sequences, exact.sequences)


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS.keys())
def test_passes_over_eight_bits_are_captured(draft: selfspec.drafts.Drafter | None) -> None:
    model, runtime = tiny.llama(), StandIn(0, 16)
    spec, stock = wrapped(model, runtime, draft), kept(model, "int8")
    spec.limits = stock.limits
    for new in (30, 40):
        found = spec.generate(PROMPTS, MASK, max_new_tokens=new, do_sample=False).sequences
        assert torch.equal(found, stock.generate(PROMPTS, MASK, max_new_tokens=new, do_sample=False).sequences)
    assert not spec.programs.refusals
    assert spec.programs.proved
    assert {kind.kept for kind in spec.programs.proved} == {"int8"}


@pytest.mark.parametrize("make", [tiny.llama, tiny.gpt2, tiny.mistral], ids=["llama", "gpt2", "mistral"])
def test_scores_of_eight_bits_are_near_the_exact_ones(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    options: dict[str, Any] = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    prompt = tiny.prompt(40)
    specs = (kept(model, "int8"), selfspec.wrap(model))
    near, exact = (cast(Any, spec.generate(prompt, **options).logits)[0] for spec in specs)
    assert 0 < (near - exact).abs().max() < 0.05 * exact.std()


def test_eight_bits_take_a_fraction_of_the_bytes() -> None:
    sizes = {}
    for cache in ("exact", "int8"):
        output = kept(tiny.llama(dtype=torch.float32), cache).generate(PROMPTS, MASK, max_new_tokens=8)
        sizes[cache] = output.stats.cache_bytes
    # Heads of 8 numbers and a scale of two bytes; those of models are 8 to 16 times as wide.
    assert sizes["int8"] == sizes["exact"] * (8 + 2) // 32


@pytest.mark.parametrize("cache", ["host", "int8"])
def test_a_cache_that_is_handed_back_goes_on(cache: CacheKind) -> None:
    model = tiny.llama()
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    whole = kept(model, cache).generate(PROMPTS[:1], max_new_tokens=12, **options).sequences
    first = kept(model, cache, "exit:2").generate(
        PROMPTS[:1], max_new_tokens=6, return_dict_in_generate=True, **options
    )
    second = kept(model, cache).generate(first.sequences, cache=first.cache, max_new_tokens=6, **options)
    assert torch.equal(second.sequences, whole)


def test_rows_that_end_and_rows_that_fail_are_dropped_and_scrubbed() -> None:
    cache = SharedCache(1, 2, limit=20, slack=2, device=CPU, kept="int8")
    states = torch.arange(2 * 2 * 5 * 8, dtype=torch.float32).reshape(2, 2, 5, 8)
    keys, values = cache.update(states, -states, 0)
    torch.testing.assert_close(keys, states, rtol=0.01, atol=0.5)
    torch.testing.assert_close(values, -states, rtol=0.01, atol=0.5)
    cache.commit([3, 3])
    cache.scrub([0])
    assert all(not part[0, :, 3:].any() for part in cache.layers[0].parts)
    cache.narrow([1])
    assert {part.shape[0] for part in cache.layers[0].parts} == {1}
    assert not cache.lossless


@pytest.mark.contract
def test_a_budget_says_how_keys_and_values_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama(dtype=torch.float32, intermediate_size=64)
    model.save_pretrained(tmp_path)
    spec = selfspec.load(tmp_path, "64GiB", device="cpu", context=200, cache="int8")
    assert not spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False).lossless
    # Whoever wraps the model keeps to it.
    assert not selfspec.wrap(spec.model, "lookup").generate(PROMPTS, MASK, max_new_tokens=8).lossless
    with pytest.raises(UnsupportedOptionError, match=r"cache='host'.*exact or int8.*leave it out"):
        selfspec.load(tmp_path, "64GiB", device="cpu", cache="host")
    with pytest.raises(UnsupportedOptionError, match=r"cache=.int4.*exact, host, int8"):
        selfspec.load(tmp_path, "64GiB", device="cpu", cache="int4")
    stand_in_device(monkeypatch)
    # 512 bytes a token, and masks: with all of them the device has no room, and the host has.
    budget, context = 400 * 2**20, 2**20
    spec = selfspec.load(tmp_path, budget, context=context)
    placement: Any = placement_of(spec.model)
    assert placement.cache == "host"
    output = spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False)
    assert output.lossless
    assert torch.equal(output.sequences, selfspec.wrap(model).generate(PROMPTS, MASK, max_new_tokens=8).sequences)
    with pytest.raises(UnsupportedOptionError, match="too little"):
        selfspec.load(tmp_path, budget, context=context, cache="exact")
    assert placement_of(selfspec.load(tmp_path, "64GiB", context=200).model).cache == "exact"  # type: ignore[union-attr]


def test_models_with_states_keep_them_as_they_are(tmp_path: Path) -> None:
    config = Mamba2Config(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=1, expand=2
    )
    Mamba2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="have states, which stay as they are"):
        selfspec.load(tmp_path, "64GiB", device="cpu", cache="int8")
