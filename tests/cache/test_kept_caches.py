"""Keys and values on the host are the very numbers; in 8 bits they are near; copies in few bits serve drafts alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.any_rounds import AnyRounds, any_rounds
from helpers.captures import DRAFTS, StandIn, wrapped
from helpers.copies import MASK, PROMPTS, stand_in_device
from helpers.reference import begun
from selfspec.cache import view
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.shared_layer import CacheKind
from selfspec.cache.tree import Tree
from selfspec.cache.view import CacheBits, CacheView, copied_bytes, rounded, through_copy
from selfspec.control import FixedLength
from selfspec.decode.generation import Limits
from selfspec.errors import DraftConfigError, UnsupportedModelError, UnsupportedOptionError
from selfspec.kernels import native
from selfspec.model.layer_path import LayerPath
from selfspec.model.registry import find_adapter
from selfspec.placement.drafts import placement_of
from selfspec.runtime.request import PassRequest

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


def states(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [6, 64, 128])
def test_numbers_move_by_half_a_level_of_their_group(bits: CacheBits, size: int) -> None:
    exact = states(2, 3, 5, size)
    levels, factors = rounded(exact, bits)
    assert levels.numel() + factors.nbytes == copied_bytes(exact.numel(), size, bits)
    read = through_copy(exact, levels, factors, torch.tensor([5, 2]), bits)
    groups = exact.unflatten(-1, (-1, 64 if size % 64 == 0 else size))
    level = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    moved = (read - exact).unflatten(-1, (groups.shape[-2], -1)).abs().amax(-1)
    assert (moved <= 0.501 * level + 1e-6).all()
    assert torch.equal(read[1, :, 2:], exact[1, :, 2:])
    assert not torch.equal(read[1, :, :2], exact[1, :, :2])


def test_groups_of_equal_numbers_are_kept() -> None:
    exact = torch.full((1, 1, 2, 64), 3.0)
    assert torch.equal(through_copy(exact, *rounded(exact, 4), torch.tensor([2]), 4), exact)


class Rows:
    """A model with a cache of some rows, and what a draft over copies sees of it."""

    def __init__(self, model: PreTrainedModel, lengths: list[int], seed: int = 0) -> None:
        self.runner = begun(model, tiny.prompt(max(lengths), len(lengths), seed=seed), lengths)
        self.cache = self.runner.cache
        self.cache.hold(4, 150)

    def drafted(self, bits: CacheBits | None) -> Tensor:
        rows = len(self.cache.seq_lens)
        path = LayerPath(self.runner.depth, view=CacheView(bits=bits))
        logits = self.runner.run(PassRequest(path, torch.full((rows, 2), 7))).logits
        self.cache.commit([0] * rows)
        return logits

    def assert_copied(self, bits: CacheBits) -> None:
        """Compare a draft with one over a copy that is made anew."""
        found = self.drafted(bits)
        for copy in self.cache._copies.values():
            copy.forget()
        assert torch.equal(found, self.drafted(bits))
        assert not torch.equal(found, self.drafted(None))


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
def test_a_copy_follows_its_rows(bits: CacheBits) -> None:
    model = tiny.llama()
    rows = Rows(model, [9, 12, 5])
    rows.assert_copied(bits)
    # More tokens, side by side or along a branch.
    rows.runner.run(PassRequest(LayerPath.full(4), tiny.prompt(3, 3, seed=4)))
    rows.cache.commit([3, 1, 2])
    rows.assert_copied(bits)
    rows.cache.open(Tree((-1, -1, 1)))
    rows.runner.run(PassRequest(LayerPath.full(4), tiny.prompt(4, 3, seed=5)))
    rows.cache.commit_paths([[-1, 1, 2], [-1, 0], [-1]])
    rows.assert_copied(bits)
    # Rows leave, come and move; one of the same length takes another's place.
    rows.cache.keep([0, 2])
    rows.assert_copied(bits)
    rows.cache.join(Rows(model, [13], seed=6).cache)
    rows.assert_copied(bits)
    rows.cache.narrow([2, 1])
    rows.assert_copied(bits)
    rows.cache.hold(2, 180)
    rows.assert_copied(bits)
    taken = Rows(model, [14])
    taken.assert_copied(bits)
    taken.cache.take(rows.cache, 0, 13)
    taken.assert_copied(bits)
    taken.cache.take(rows.cache, 1, 8)
    taken.assert_copied(bits)


@torch.no_grad()
def test_a_copy_is_made_once_of_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    rounding = mock.Mock(wraps=view._round_slots)
    monkeypatch.setattr(view, "_round_slots", rounding)
    rows = Rows(tiny.llama(), [6, 9])
    rows.drafted(8)
    rows.drafted(8)
    rows.runner.run(PassRequest(LayerPath.full(4), tiny.prompt(3, 2, seed=4)))
    rows.cache.commit([3, 1])
    rows.drafted(8)
    assert [call.args[2:4] for call in rounding.call_args_list] == [([0, 0], [6, 9]), ([6, 9], [9, 10])]


@torch.no_grad()
def test_only_drafts_see_it(llama: PreTrainedModel) -> None:
    rows = Rows(llama, [9])
    before = rows.drafted(None)
    drafted = rows.drafted(4)
    assert torch.equal(rows.drafted(None), before)
    # Its bytes count; it sees committed tokens as they were copied.
    assert rows.cache.nbytes > sum(layer.nbytes for layer in rows.cache.layers)
    rows.cache.layers[0].keys[:, :, 3] += 1
    assert torch.equal(rows.drafted(4), drafted)
    assert not torch.equal(rows.drafted(None), before)


@pytest.mark.parametrize("kept", ["int8", "host"])
def test_keys_and_values_that_are_kept_otherwise_are_refused(llama: PreTrainedModel, kept: str) -> None:
    cache = find_adapter(llama).shared_cache(llama, 1, 64, 8, kept=kept)  # type: ignore[arg-type]
    with pytest.raises(DraftConfigError, match=f"cache='{kept}'"):
        cache.check_copies()


@pytest.mark.kernels
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [6, 64, 192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_round_alike(bits: CacheBits, size: int, dtype: torch.dtype) -> None:
    assert native.available()
    exact = states(3, 2, 9, size).to(dtype)
    expected, factors = rounded(exact, bits)
    found = (torch.zeros_like(expected), torch.zeros(factors.shape))
    native.round_slots(exact, found[0], found[1], torch.tensor([0, 4, 2]), torch.tensor([9, 9, 2]))
    for row, begin in enumerate((0, 4)):
        assert torch.equal(found[0][row, :, begin:], expected[row, :, begin:])
        assert torch.equal(found[1][row, ..., begin:], factors[row, ..., begin:])
    assert not found[0][2].any()
    assert not found[0][1, :, :4].any()
