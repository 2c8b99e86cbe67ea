"""The shared cache: rows of any raggedness read right, room doubles, rolling back is free, and memory goes at once."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.any_rounds import AnyRounds, AnyShrunkenRounds, alone, any_rounds
from helpers.captures import Operations
from helpers.shrunken import shrunken
from helpers.snapshot import tensor_bytes
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.tree import Tree
from selfspec.compat import OUTPUT_CACHE
from selfspec.draft import Drafter, EarlyExit, LayerSkip
from selfspec.errors import UnsupportedModelError
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner

CPU = torch.device("cpu")

TestAnyRounds = pytest.mark.contract(any_rounds(AnyRounds, 12))
TestAnyRoundsMistral = pytest.mark.contract(any_rounds(AnyRounds, 10, architecture="mistral"))
TestAnyRoundsQwen2 = pytest.mark.contract(any_rounds(AnyRounds, 10, architecture="qwen2"))
TestAnyRoundsGPT2 = pytest.mark.contract(any_rounds(AnyRounds, 10, architecture="gpt2"))
TestAnyRoundsGemma2 = pytest.mark.contract(any_rounds(AnyShrunkenRounds, 10, architecture="gemma2", kernels=("eager",)))
# Chunked attention, and every other layer without.
TestAnyRoundsLlama4 = pytest.mark.contract(any_rounds(AnyShrunkenRounds, 10, architecture="llama4_text"))
TestAnyRoundsInBuckets = pytest.mark.contract(any_rounds(AnyRounds, 10, bucket=16))
TestAnyRoundsInBucketsMistral = pytest.mark.contract(any_rounds(AnyRounds, 10, architecture="mistral", bucket=16))


def test_infinite_scrap_in_one_row_does_not_reach_another(llama: PreTrainedModel) -> None:
    cache = SharedCache(tiny.DEPTH, 2, limit=30, slack=4, device=CPU)
    passes = ModelRunner(llama, ADAPTERS["llama"], cache)
    tokens = tiny.prompt(8, 2)
    with torch.no_grad():
        passes.run(PassRequest(LayerPath.full(tiny.DEPTH), tokens, headless=True))
        for layer in cache.layers:
            layer.keys[1], layer.values[1] = float("nan"), float("inf")
        cache.commit([8, 3])
        logits = passes.run(PassRequest(LayerPath.full(tiny.DEPTH), tokens[:, :1])).logits
    wanted = alone(llama, [*tokens[0].tolist(), int(tokens[0, 0])], 1)
    torch.testing.assert_close(logits[0], wanted, rtol=0, atol=1e-9)


def test_moving_the_cursors_does_no_tensor_operation(llama: PreTrainedModel) -> None:
    cache = SharedCache(tiny.DEPTH, 2, limit=100, slack=4, device=CPU)
    passes = ModelRunner(llama, ADAPTERS["llama"], cache)
    cache.cursors.reserve(90)
    with torch.no_grad():
        passes.run(PassRequest(LayerPath.full(tiny.DEPTH), tiny.prompt(90, 2), headless=True))
    held = [(layer.keys, layer.values) for layer in cache.layers]
    seen: list[object] = []
    with Operations(lambda func, _: seen.append(func)):
        cache.commit([87, 2])
        cache.commit([2, 0])
        cache.open(Tree((-1, -1, 0)))
        cache.commit_paths([(-1, 0), ()])
        assert not seen
        torch.zeros(1)
        assert len(seen) == 1, "the counter counts"
    for layer, (keys, values) in zip(cache.layers, held, strict=True):
        assert layer.keys is keys
        assert layer.values is values


def test_the_tensors_of_a_pass_are_different_objects(llama: PreTrainedModel) -> None:
    # A recorded pass knows them by identity: slots and position ids are equal in most passes, and not in all.
    cache = SharedCache(tiny.DEPTH, 2, limit=100, slack=4, device=CPU)
    cache.cursors.reserve(30)
    with torch.no_grad():
        ModelRunner(llama, ADAPTERS["llama"], cache).run(PassRequest(LayerPath.full(tiny.DEPTH), tiny.prompt(20, 2)))
    for committed in ([5, 5], [2, 0]):
        cache.commit(committed)
        for width in (1, 3):
            slots = cache.slots(width)
            assert slots is not None
            tensors = [slots.slot_mapping, slots.positions, slots.visible, *slots.buffers]
            assert len({id(tensor) for tensor in tensors}) == len(tensors)


# Room.


@pytest.mark.parametrize(
    ("limit", "sizes"), [(300, [64, 128, 256, 300]), (3, [3]), (64, [64]), (65, [64, 65])], ids=str
)
def test_room_doubles_up_to_the_limit_and_a_draft_behind_it(limit: int, sizes: list[int]) -> None:
    cache = SharedCache(tiny.DEPTH, 1, limit=limit, slack=5, device=CPU)
    seen: list[int] = []
    for committed in range(1, limit + 100):
        cache.cursors.reserve(committed)
        if not seen or cache.cursors.capacity != seen[-1]:
            seen.append(cache.cursors.capacity)
        assert cache.cursors.capacity >= min(committed, limit) + 5
    assert seen == [size + 5 for size in sizes]
    cache.cursors.reserve(3)
    assert cache.cursors.capacity == limit + 5, "it is kept"


@pytest.mark.parametrize("limit", [5, 61, 200, 1000])
@pytest.mark.parametrize("slack", [0, 3, 70])
def test_caches_of_many_lengths_have_slots_in_whole_buckets(limit: int, slack: int) -> None:
    cache = SharedCache(1, 1, limit, slack, CPU, bucket=64)
    for committed in range(1, limit, 50):
        cache.cursors.reserve(committed)
        assert cache.cursors.capacity % 64 == 0
        assert min(committed, limit) + slack <= cache.cursors.capacity
    assert cache.cursors.capacity < 64 + limit + slack


class Watch:
    """Sees the cache of a generation through the model's own arguments, and holds no reference to it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.slots: list[int] = []
        self.addresses: list[int] = []
        self.keys: list[weakref.ref[Tensor]] = []
        self.caches: list[weakref.ref[Any]] = []
        model.model.layers[0].self_attn.register_forward_hook(self._look, with_kwargs=True)

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


@pytest.fixture
def watch(llama: PreTrainedModel) -> Watch:
    return Watch(llama)


DRAFTS: dict[str, Drafter | None] = {
    "plain": None,
    "exit": EarlyExit(2),
    "sublayers": LayerSkip(attention=[1], mlp=[2]),
    "layers": LayerSkip(layers=[0, 3]),
}
drafting = pytest.mark.parametrize("draft", list(DRAFTS.values())[1:], ids=list(DRAFTS)[1:])


@drafting
def test_slots_are_allocated_once_and_then_doubled(llama: PreTrainedModel, watch: Watch, draft: Drafter) -> None:
    wanted = llama.generate(tiny.prompt(5), max_new_tokens=75, do_sample=False)
    watch.slots.clear()
    watch.addresses.clear()
    spec = selfspec.wrap(llama, draft, draft_length=4)
    assert torch.equal(spec.generate(tiny.prompt(5), max_new_tokens=75, do_sample=False).sequences, wanted)
    assert sorted(set(watch.slots)) == [64 + 4, 80 + 4]
    assert watch.slots == sorted(watch.slots)
    # One address as long as the size is the same.
    assert len(set(zip(watch.slots, watch.addresses, strict=True))) == 2


@pytest.fixture(params=DRAFTS)
def spec(llama: PreTrainedModel, request: pytest.FixtureRequest) -> selfspec.SelfSpeculative:
    return selfspec.wrap(llama, DRAFTS[request.param], draft_length=4)


def test_the_cache_counts_its_bytes(spec: selfspec.SelfSpeculative) -> None:
    out = spec.generate(tiny.prompt(5, 2), max_new_tokens=7)
    slots = 5 + 7 + (0 if spec.draft is None else 4)
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
class TestMemoryGoesAtOnce:
    def test_when_a_generation_ends(self, spec: selfspec.SelfSpeculative, watch: Watch) -> None:
        out = spec.generate(tiny.prompt(5, 2), max_new_tokens=70)
        assert len(watch.keys) >= 2
        assert watch.alive == 0
        assert out.sequences.shape == (2, 75)

    def test_when_a_stream_ends(self, spec: selfspec.SelfSpeculative, watch: Watch) -> None:
        stream = spec.stream(tiny.prompt(5), max_new_tokens=9)
        for _ in stream:
            assert watch.alive == 2
        assert watch.keys
        assert watch.alive == 0, "the stream is kept for its stats, its memory is not"
        assert stream.output().lengths == (9,)

    def test_when_a_stream_is_closed_or_abandoned(self, spec: selfspec.SelfSpeculative, watch: Watch) -> None:
        stream = spec.stream(tiny.prompt(5), max_new_tokens=9)
        committed = len(next(stream).tokens)
        assert watch.alive == 2
        stream.close()
        assert watch.alive == 0
        assert next(stream, None) is None
        assert stream.output().lengths == (committed,)
        stream = spec.stream(tiny.prompt(5), max_new_tokens=9)
        next(stream)
        assert watch.alive == 2
        del stream
        assert watch.alive == 0

    def test_when_a_stream_was_never_begun(self, spec: selfspec.SelfSpeculative) -> None:
        def caches() -> int:
            return sum(issubclass(type(thing), SharedCache) for thing in gc.get_objects())

        before = caches()
        stream = spec.stream(tiny.prompt(5), max_new_tokens=9)
        del stream
        assert caches() == before

    @pytest.mark.parametrize(
        ("error", "module"),
        [
            (RuntimeError, "model.layers.3.mlp"),
            (KeyboardInterrupt, "model.layers.0"),
            (torch.OutOfMemoryError, "lm_head"),
        ],
    )
    def test_after_an_exception(
        self, spec: selfspec.SelfSpeculative, watch: Watch, error: type[BaseException], module: str
    ) -> None:
        calls = iter(range(1, 99))

        def failing(*_: object) -> None:
            if next(calls) == 6:
                raise error("planted")

        spec.model.get_submodule(module).register_forward_hook(failing)
        with contextlib.suppress(error):
            spec.generate(tiny.prompt(5), max_new_tokens=30)
            pytest.fail("nothing was raised")
        assert watch.keys
        assert watch.alive == 0


@drafting
def test_nothing_is_held_twice(draft: Drafter) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 256}
    model = tiny.llama(**sizes)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    selfspec.wrap(tiny.llama(), draft, draft_length=4).generate(tiny.prompt(5), max_new_tokens=3)
    watch = Watch(model)
    before = tensor_bytes()
    stream = selfspec.wrap(model, draft, draft_length=4).stream(tiny.prompt(5), max_new_tokens=12)
    next(stream)
    next(stream)
    held_more = tensor_bytes() - before
    cache = watch.caches[0]()
    assert isinstance(cache, SharedCache)
    assert held_more > cache.nbytes, "the scan finds tensors"
    small_change = 30_000
    assert small_change < 0.02 * weights
    assert held_more < cache.nbytes + small_change


@pytest.mark.parametrize("part", list(Part))
def test_a_layer_whose_attention_never_runs_allocates_when_it_first_does(llama: PreTrainedModel, part: Part) -> None:
    cache = SharedCache(tiny.DEPTH, 1, limit=10, slack=1, device=CPU)
    passes = ModelRunner(llama, ADAPTERS["llama"], cache)
    with torch.no_grad():
        passes.run(PassRequest(LayerPath.up_to(tiny.DEPTH, Sublayer(2, part)), tiny.prompt(3), headless=True))
    allocated = [layer.keys is not None for layer in cache.layers]
    assert allocated == [True, True, part is Part.MLP, False]


FORK = Tree((-1, -1, 0, 0, 1, 2))


def test_what_follows_from_parents() -> None:
    assert len(FORK) == 6
    assert FORK.depths == (1, 1, 2, 2, 2, 3)
    assert FORK.depth == 3
    assert FORK.paths == ((0,), (1,), (0, 2), (0, 3), (1, 4), (0, 2, 5))
    assert FORK.children == ((0, 1), (2, 3), (4,), (5,), (), (), ())
    assert not FORK.is_chain


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-2,), (-1, 2, 0)])
def test_a_node_comes_after_its_parent(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="parent"):
        Tree(parents)


def test_the_first_branch_after_a_path() -> None:
    tree = Tree((-1, -1, 0, 0, 2))
    assert [tree.first_branch(path) for path in ((), (0,), (0, 3), (1,))] == [[0, 2, 4], [2, 4], [], []]
    assert Tree.chain(3).first_branch((0,)) == [1, 2]


@pytest.mark.parametrize("architecture", ["bloom", "gpt_neo", "roformer"])
def test_a_model_that_reads_chains_alone_is_refused_a_tree(architecture: str) -> None:
    model, adapter = shrunken(architecture), ADAPTERS[architecture]
    cache = SharedCache(tiny.DEPTH, 1, 64, len(FORK), torch.device("cpu"))
    runner = ModelRunner(model, adapter, cache)
    cache.open(FORK)
    with pytest.raises(UnsupportedModelError, match=r"cannot read a tree of drafts.*draft a chain"), torch.no_grad():
        runner.run(PassRequest(LayerPath.full(tiny.DEPTH), tiny.prompt(len(FORK) + 1)))
    cache.open(Tree.chain(3))
    with torch.no_grad():
        runner.run(PassRequest(LayerPath.full(tiny.DEPTH), tiny.prompt(4).clamp(min=3)))
