"""The shared cache: rows of any raggedness read right, room doubles, rolling back is free, and memory goes at once."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.any_rounds import AnyRounds, AnyShrunkenRounds, alone, any_rounds, tiny_model
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.tree import Tree
from selfspec.compat import OUTPUT_CACHE
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner

CPU = torch.device("cpu")
EXACT = 1e-9


# Any sequence of rounds, over any trees.

TestAnyRounds = pytest.mark.contract(any_rounds(AnyRounds, 12))
TestAnyRoundsMistral = pytest.mark.contract(any_rounds(AnyRounds, 10, architecture="mistral"))
TestAnyRoundsQwen2 = pytest.mark.contract(any_rounds(AnyRounds, 10, architecture="qwen2"))
TestAnyRoundsGPT2 = pytest.mark.contract(any_rounds(AnyRounds, 10, architecture="gpt2"))
TestAnyRoundsGemma2 = pytest.mark.contract(any_rounds(AnyShrunkenRounds, 10, architecture="gemma2", kernels=("eager",)))
# Chunked attention, and every other layer without.
TestAnyRoundsLlama4 = pytest.mark.contract(any_rounds(AnyShrunkenRounds, 10, architecture="llama4_text"))
TestAnyRoundsInBuckets = pytest.mark.contract(any_rounds(AnyRounds, 10, bucket=16))
TestAnyRoundsInBucketsMistral = pytest.mark.contract(any_rounds(AnyRounds, 10, architecture="mistral", bucket=16))


def test_ragged_rows_that_come_level_again_read_right(architecture: str) -> None:
    model = tiny_model(architecture, "sdpa")
    cache = SharedCache(tiny.DEPTH, 2, limit=60, slack=4, device=CPU)
    passes = ModelRunner(model, ADAPTERS[architecture], cache)
    rows: list[list[int]] = [[], []]
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for width, counts in ((12, (12, 4)), (4, (1, 4)), (4, (0, 4)), (2, (1, 2)), (4, (4, 4)), (3, (2, 3))):
            tokens = torch.randint(tiny.VOCABULARY, (2, width), generator=noise)
            logits = passes.run(PassRequest(LayerPath.full(tiny.DEPTH), tokens)).logits
            for index, count in enumerate(counts):
                whole = rows[index] + tokens[index].tolist()
                torch.testing.assert_close(logits[index], alone(model, whole, width), rtol=0, atol=EXACT)
                rows[index] = whole[: len(rows[index]) + count]
            cache.commit(counts)
        assert cache.seq_lens == (20, 21)


def test_infinite_scrap_in_one_row_does_not_reach_another(llama: PreTrainedModel) -> None:
    cache = SharedCache(tiny.DEPTH, 2, limit=30, slack=4, device=CPU)
    passes = ModelRunner(llama, ADAPTERS["llama"], cache)
    tokens = tiny.prompt(8, 2)
    with torch.no_grad():
        passes.states(PassRequest(LayerPath.full(tiny.DEPTH), tokens))
        for layer in cache.layers:
            layer.keys[1], layer.values[1] = float("nan"), float("inf")
        cache.commit([8, 3])
        logits = passes.run(PassRequest(LayerPath.full(tiny.DEPTH), tokens[:, :1])).logits
    wanted = alone(llama, [*tokens[0].tolist(), int(tokens[0, 0])], 1)
    torch.testing.assert_close(logits[0], wanted, rtol=0, atol=EXACT)


# Cursor moves cost nothing.


class _Operations(TorchDispatchMode):
    """Counts every tensor operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("length", [5, 90])
def test_moving_the_cursors_does_no_tensor_operation_whatever_the_length(llama: PreTrainedModel, length: int) -> None:
    cache = SharedCache(tiny.DEPTH, 2, limit=100, slack=4, device=CPU)
    passes = ModelRunner(llama, ADAPTERS["llama"], cache)
    cache.reserve(length)
    with torch.no_grad():
        passes.states(PassRequest(LayerPath.full(tiny.DEPTH), tiny.prompt(length, 2)))
    held = [(layer.keys, layer.values) for layer in cache.layers]
    addresses = [(keys.data_ptr(), values.data_ptr()) for keys, values in held]
    contents = [(keys.clone(), values.clone()) for keys, values in held]
    versions = [(keys._version, values._version) for keys, values in held]
    with _Operations() as operations:
        cache.commit([length - 3, 2])
        cache.commit([2, 0])
        cache.open(Tree((-1, -1, 0)))
        cache.commit_paths([(-1, 0, 2)[:2], ()])
        assert operations.count == 0
        torch.zeros(1)
        assert operations.count == 1, "the counter counts"
    for layer, (keys, values), address, version, content in zip(
        cache.layers, held, addresses, versions, contents, strict=True
    ):
        assert layer.keys is keys
        assert layer.values is values
        assert (keys.data_ptr(), values.data_ptr()) == address
        assert (keys._version, values._version) == version
        assert torch.equal(keys, content[0])
        assert torch.equal(values, content[1])


# Room.


def test_room_doubles_up_to_the_limit_and_a_draft_behind_it() -> None:
    cache = SharedCache(tiny.DEPTH, 1, limit=300, slack=5, device=CPU)
    seen: list[int] = []
    for committed in range(1, 400):
        cache.reserve(committed)
        if not seen or cache.capacity != seen[-1]:
            seen.append(cache.capacity)
        assert cache.capacity >= min(committed, 300) + 5
    assert seen == [64 + 5, 128 + 5, 256 + 5, 300 + 5]


@pytest.mark.parametrize(("limit", "wanted"), [(3, 3), (64, 64), (65, 65)])
def test_a_short_generation_allocates_no_more_than_it_can_use(limit: int, wanted: int) -> None:
    cache = SharedCache(tiny.DEPTH, 1, limit=limit, slack=2, device=CPU)
    cache.reserve(limit)
    assert cache.capacity == wanted + 2


def test_room_that_was_reserved_is_kept() -> None:
    cache = SharedCache(tiny.DEPTH, 1, limit=300, slack=0, device=CPU)
    cache.reserve(200)
    assert cache.capacity == 256
    cache.reserve(3)
    assert cache.capacity == 256


def test_growing_keeps_what_the_rows_hold(architecture: str) -> None:
    model = tiny_model(architecture, "sdpa")
    cache = SharedCache(tiny.DEPTH, 2, limit=120, slack=2, device=CPU)
    passes = ModelRunner(model, ADAPTERS[architecture], cache)
    tokens = tiny.prompt(70, 2)
    addresses = set()
    with torch.no_grad():
        passes.states(PassRequest(LayerPath.full(tiny.DEPTH), tokens[:, :60]))
        cache.commit([60, 58])
        for column in range(8):
            cache.reserve(61 + column)
            # The second row is two tokens behind and reads its own text.
            step = torch.stack([tokens[0, 60 + column], tokens[1, 58 + column]])[:, None]
            logits = passes.run(PassRequest(LayerPath.full(tiny.DEPTH), step)).logits
            cache.commit([1, 1])
            addresses.add(cache.layers[0].keys.data_ptr())
        torch.testing.assert_close(logits[0], alone(model, tokens[0, :68].tolist(), 1), rtol=0, atol=EXACT)
        torch.testing.assert_close(logits[1], alone(model, tokens[1, :66].tolist(), 1), rtol=0, atol=EXACT)
    assert len(addresses) == 2


class _Watch:
    """Sees the cache of a generation through the model's own arguments, and holds no reference to it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.slots: list[int] = []
        self.addresses: list[int] = []
        self.keys: list[weakref.ref[Tensor]] = []
        self.caches: list[weakref.ref[Any]] = []
        self.handle = model.model.layers[0].self_attn.register_forward_hook(self._look, with_kwargs=True)

    def _look(self, module: object, args: object, kwargs: dict[str, Any], output: object) -> None:
        cache = kwargs[OUTPUT_CACHE]
        keys = cache.layers[0].keys
        self.slots.append(keys.shape[2])
        self.addresses.append(keys.data_ptr())
        if not self.keys or self.keys[-1]() is not keys:
            self.keys.append(weakref.ref(keys))
            self.caches.append(weakref.ref(cache))

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in [*self.keys, *self.caches])


DRAFTS: dict[str, selfspec.drafts.Drafter] = {
    "exit": selfspec.drafts.EarlyExit(2),
    "sublayers": selfspec.drafts.LayerSkip(attention=[1], mlp=[2]),
    "layers": selfspec.drafts.LayerSkip(layers=[0, 3]),
}


@pytest.mark.parametrize(("draft", "draft_length"), [*((d, 4) for d in DRAFTS.values()), (DRAFTS["exit"], 1)])
def test_slots_are_allocated_once_and_then_doubled(draft: selfspec.drafts.Drafter, draft_length: int) -> None:
    model = tiny.llama()
    watch = _Watch(model)
    spec = selfspec.wrap(model, draft, draft_length=draft_length)
    spec.generate(tiny.prompt(5), max_new_tokens=75)
    assert sorted(set(watch.slots)) == [64 + draft_length, 80 + draft_length]
    assert watch.slots == sorted(watch.slots)
    # One address as long as the size is the same.
    assert len(set(zip(watch.slots, watch.addresses, strict=True))) == 2


@pytest.mark.parametrize("prompt", [3, 60])
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_drafting_holds_at_most_a_draft_and_a_token_more_than_plain_decoding(
    draft: selfspec.drafts.Drafter, prompt: int
) -> None:
    draft_length, new = 4, 66
    held: list[dict[int, int]] = []
    for drafter in (None, draft):
        model = tiny.llama()
        watch = _Watch(model)
        spec = selfspec.wrap(model, drafter, draft_length=draft_length)
        slots: dict[int, int] = {}
        committed = 0
        for chunk in spec.stream(tiny.prompt(prompt), max_new_tokens=new):
            committed += len(chunk.tokens)
            slots[committed] = watch.slots[-1]
        assert committed == new
        held.append(slots)
    plain, drafting = held
    assert len(plain) == new
    assert all(slots <= plain[committed] + draft_length + 1 for committed, slots in drafting.items())


@pytest.mark.parametrize("draft", [None, *DRAFTS.values()], ids=["plain", *DRAFTS])
def test_the_cache_counts_its_bytes(llama: PreTrainedModel, draft: selfspec.drafts.Drafter | None) -> None:
    out = selfspec.wrap(llama, draft, draft_length=3).generate(tiny.prompt(5, 2), max_new_tokens=7)
    slots = 5 + 7 + (0 if draft is None else 3)
    heads, head_dim, fp64 = 2, 8, 8
    assert out.stats.cache_bytes == 2 * tiny.DEPTH * 2 * slots * heads * head_dim * fp64


# Memory.


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the garbage collector: what lives in a reference cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("draft", [None, *DRAFTS.values()], ids=["plain", *DRAFTS])
class TestMemoryGoesAtOnce:
    def test_when_a_generation_ends(self, llama: PreTrainedModel, draft: selfspec.drafts.Drafter | None) -> None:
        watch = _Watch(llama)
        out = selfspec.wrap(llama, draft, draft_length=4).generate(tiny.prompt(5, 2), max_new_tokens=70)
        assert len(watch.keys) >= 2
        assert watch.alive == 0
        assert out.sequences.shape == (2, 75)

    def test_when_a_stream_ends(self, llama: PreTrainedModel, draft: selfspec.drafts.Drafter | None) -> None:
        watch = _Watch(llama)
        stream = selfspec.wrap(llama, draft, draft_length=4).stream(tiny.prompt(5), max_new_tokens=9)
        for _ in stream:
            assert watch.alive == 2
        assert watch.keys
        assert watch.alive == 0, "the stream is kept for its stats, its memory is not"
        assert stream.output().lengths == (9,)

    def test_when_a_stream_is_abandoned(self, llama: PreTrainedModel, draft: selfspec.drafts.Drafter | None) -> None:
        watch = _Watch(llama)
        stream = selfspec.wrap(llama, draft, draft_length=4).stream(tiny.prompt(5), max_new_tokens=9)
        next(stream)
        assert watch.alive == 2
        del stream
        assert watch.alive == 0

    def test_when_a_stream_is_closed(self, llama: PreTrainedModel, draft: selfspec.drafts.Drafter | None) -> None:
        watch = _Watch(llama)
        stream = selfspec.wrap(llama, draft, draft_length=4).stream(tiny.prompt(5), max_new_tokens=9)
        committed = len(next(stream).tokens)
        stream.close()
        assert watch.alive == 0, "the stream is kept for its stats, its memory is not"
        assert next(stream, None) is None
        assert stream.output().lengths == (committed,)

    def test_when_a_stream_was_never_begun(self, llama: PreTrainedModel, draft: selfspec.drafts.Drafter | None) -> None:
        caches = _alive(SharedCache)
        stream = selfspec.wrap(llama, draft, draft_length=4).stream(tiny.prompt(5), max_new_tokens=9)
        del stream
        assert _alive(SharedCache) == caches

    def test_through_custom_generate(self, llama: PreTrainedModel, draft: selfspec.drafts.Drafter | None) -> None:
        watch = _Watch(llama)
        llama.generate(tiny.prompt(5), custom_generate=selfspec.wrap(llama, draft, draft_length=4), max_new_tokens=9)
        assert watch.keys
        assert watch.alive == 0

    def test_when_a_stream_failed(self, llama: PreTrainedModel, draft: selfspec.drafts.Drafter | None) -> None:
        watch = _Watch(llama)
        stream = selfspec.wrap(llama, draft, draft_length=4).stream(tiny.prompt(5), max_new_tokens=30)
        next(stream)

        def failing(*_: object) -> None:
            raise RuntimeError("planted")

        llama.model.layers[2].register_forward_hook(failing)
        try:
            next(stream)
        except RuntimeError:
            pass
        else:
            pytest.fail("nothing was raised")
        assert watch.alive == 0, "the stream is kept for what it gave, its memory is not"
        assert stream.output().sequences.shape[1] >= 6

    @pytest.mark.parametrize(
        ("error", "module"),
        [
            (RuntimeError, "model.layers.3.mlp"),
            (KeyboardInterrupt, "model.layers.0"),
            (torch.OutOfMemoryError, "lm_head"),
        ],
    )
    def test_after_an_exception(
        self, llama: PreTrainedModel, draft: selfspec.drafts.Drafter | None, error: type[BaseException], module: str
    ) -> None:
        watch = _Watch(llama)
        calls = 0

        def failing(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 6:
                raise error("planted")

        llama.get_submodule(module).register_forward_hook(failing)
        try:
            selfspec.wrap(llama, draft, draft_length=4).generate(tiny.prompt(5), max_new_tokens=30)
        except error:
            pass
        else:
            pytest.fail("nothing was raised")
        assert watch.keys
        assert watch.alive == 0


def _alive(kind: type) -> int:
    return sum(issubclass(type(thing), kind) for thing in gc.get_objects())


def _bytes_alive() -> int:
    """Bytes of all distinct storages that Python tensors hold in memory."""
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            # Torch's compiler keeps some hundred fake tensors, which say that they are on a CPU; their storages do not.
            if storage.device.type == "cpu":
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_only_what_is_in_memory_counts_as_alive() -> None:
    before = _bytes_alive()
    with FakeTensorMode():
        fake = torch.empty(1000)
    others = (torch.empty(1000, device="meta"), torch.eye(3).to_sparse())
    assert _bytes_alive() == before
    real = torch.empty(1000)
    assert _bytes_alive() == before + real.nbytes
    del fake, others


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_nothing_is_held_twice(architecture: str, draft: selfspec.drafts.Drafter) -> None:
    sizes: dict[str, int] = {"hidden_size": 128, "num_attention_heads": 8}
    if architecture == "llama":
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 256}
    model = tiny.BUILDERS[architecture](**sizes)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    selfspec.wrap(tiny.BUILDERS[architecture](), draft, draft_length=4).generate(tiny.prompt(5), max_new_tokens=3)
    caches: list[weakref.ref[Any]] = []
    spy = _layers(model)[0].register_forward_pre_hook(_cache_spy(caches), with_kwargs=True)
    gc.collect()
    before = _bytes_alive()
    stream = selfspec.wrap(model, draft, draft_length=4).stream(tiny.prompt(5), max_new_tokens=12)
    next(stream)
    next(stream)
    held_more = _bytes_alive() - before
    cache = caches[0]()
    assert isinstance(cache, SharedCache)
    assert held_more > cache.nbytes, "the scan finds tensors"
    spy.remove()
    small_change = 30_000
    assert small_change < 0.02 * weights
    assert held_more < cache.nbytes + small_change


def _layers(model: PreTrainedModel) -> Any:
    return ADAPTERS[model.config.model_type].decoder_layers(model)


def _cache_spy(found: list[weakref.ref[Any]]) -> Callable[..., None]:
    def look(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.extend(weakref.ref(value) for value in [*args, *kwargs.values()] if isinstance(value, SharedCache))

    return look


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_every_module_alive_during_a_stream_holds_the_models_own_weights(
    architecture: str, draft: selfspec.drafts.Drafter
) -> None:
    model = tiny.BUILDERS[architecture]()
    own = {parameter.data_ptr() for parameter in model.parameters()}
    # Held, so that none of them goes and leaves its number to a new one.
    others = {id(thing): thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)}
    stream = selfspec.wrap(model, draft, draft_length=4).stream(tiny.prompt(5), max_new_tokens=20)
    next(stream)
    next(stream)
    new = [t for t in gc.get_objects() if issubclass(type(t), torch.nn.Module) and id(t) not in others]
    assert len(new) >= 3, "the views were not found"
    for module in new:
        for parameter in module.parameters():
            assert parameter.data_ptr() in own
    del stream


def test_a_copy_of_the_model_made_during_a_stream_has_separate_weights(llama: PreTrainedModel) -> None:
    stream = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=4).stream(
        tiny.prompt(5), max_new_tokens=20
    )
    next(stream)
    copied = copy.deepcopy(llama)
    own = {parameter.data_ptr() for parameter in llama.parameters()}
    assert not own & {parameter.data_ptr() for parameter in copied.parameters()}
    del stream


@pytest.mark.parametrize("part", list(Part))
def test_a_layer_whose_attention_never_runs_allocates_when_it_first_does(llama: PreTrainedModel, part: Part) -> None:
    cache = SharedCache(tiny.DEPTH, 1, limit=10, slack=1, device=CPU)
    passes = ModelRunner(llama, ADAPTERS["llama"], cache)
    with torch.no_grad():
        passes.states(PassRequest(LayerPath.up_to(tiny.DEPTH, Sublayer(2, part)), tiny.prompt(3)))
    allocated = [layer.keys is not None for layer in cache.layers]
    assert allocated == [True, True, part is Part.MLP, False]


@pytest.mark.parametrize("limit", [5, 61, 200, 1000])
@pytest.mark.parametrize("slack", [0, 3, 70])
def test_caches_of_many_lengths_have_slots_in_whole_buckets(limit: int, slack: int) -> None:
    cache = SharedCache(1, 1, limit, slack, torch.device("cpu"), bucket=64)
    for committed in range(1, limit, 50):
        cache.reserve(committed)
        assert cache.capacity % 64 == 0
        assert min(committed, limit) + slack <= cache.capacity
    assert cache.capacity < 64 + limit + slack
