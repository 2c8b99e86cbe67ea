"""Programs recorded of passes: the same tokens and bits, over trees too, made and used where they proved themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.any_rounds import AnyRounds, any_rounds
from helpers.captures import Again, Operations, StandIn, assert_stock, ragged_samples, ticking, wrapped
from helpers.shrunken import shrunken
from helpers.snapshot import Snapshot
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.tree import Tree
from selfspec.errors import UnsupportedModelError
from selfspec.model.layer_path import LayerPath
from selfspec.runtime import Eager
from selfspec.runtime.graph_cache import GraphCache, _Candidate
from selfspec.runtime.model_state import run_watched
from selfspec.runtime.pass_function import PassFunction, PassKind, PassTensors
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner, runner_for
from selfspec.runtime.runtime import Function, close

PROMPT, NEW = 9, 24
EXIT = selfspec.drafts.EarlyExit(1)


def test_programs_come_after_some_passes_and_last_for_the_wrapper(llama: PreTrainedModel) -> None:
    spec = wrapped(llama, Again(after=10))
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=11, do_sample=False)
    assert not spec.programs.proved
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=5, do_sample=False)
    proved = spec.programs.proved
    assert [(kind.rows, kind.width, kind.uniform) for kind in proved] == [(1, 1, True)]
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=4, do_sample=False)
    assert spec.programs.proved == proved


@dataclass(frozen=True)
class Costly(Again):
    """Programs that take as long to make as two passes by a clock that is `ticking`, or whatever a test says."""

    making_seconds: float = 0.55


def test_fewer_passes_are_enough_where_they_take_long(llama: PreTrainedModel) -> None:
    usual, costly = wrapped(llama, Again(after=1000)), wrapped(llama, Costly(after=1000))
    for spec in (usual, costly):
        spec.generate(tiny.prompt(PROMPT), max_new_tokens=NEW, do_sample=False)
    assert not usual.programs.proved
    assert [kind.width for kind in costly.programs.proved] == [1]


class _Own(nn.Linear):
    """Somebody's own module."""


def test_foreign_modules_run_unrecorded(llama: PreTrainedModel) -> None:
    own = _Own(llama.lm_head.in_features, llama.lm_head.out_features, bias=False).double()
    llama.lm_head = own
    spec = wrapped(llama, Again(after=0))
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=NEW, do_sample=False)
    assert not spec.programs.proved


def test_a_dispatch_mode_sees_every_operation(llama: PreTrainedModel) -> None:
    seen: list[object] = []
    spec = wrapped(llama, Again(after=0))
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=NEW, do_sample=False)
    with Operations(lambda func, _: seen.append(func)):
        spec.generate(tiny.prompt(PROMPT), max_new_tokens=NEW, do_sample=False)
    linears = sum(isinstance(module, nn.Linear) for module in llama.modules())
    products = sum(map(seen.count, (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)))
    assert products == linears * NEW  # The prompt's pass gives the first token.


def test_models_that_decide_by_values_run_unrecorded() -> None:
    # Expert by expert, as far as any was chosen.
    spec = wrapped(shrunken("mixtral"), StandIn(0, 8))
    assert_stock(spec, tiny.prompt(PROMPT), 8)
    assert all("depends on values" in reason for reason in spec.programs.refusals.values())
    assert spec.programs.refusals


@dataclass(frozen=True)
class _InThrees(Again):
    """Programs over multiples of three tokens; each says how many of its slots were left, and over how many it ran."""

    ran: list[int] = field(default_factory=list, compare=False)
    left: list[int] = field(default_factory=list, compare=False)

    def width(self, tokens: int) -> int:
        return -(-tokens // 3) * 3

    def agree(self, kind: PassKind, given: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
        return close(given, expected)

    def program(self, function: PassFunction, example: PassTensors) -> Function:
        def run(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            self.ran.append(tensors[0].shape[1])
            self.left.append(tensors[-1].shape[2] - int(tensors[1].max()) - 1)
            return function(tensors)

        return run


@pytest.mark.parametrize("draft", [None, selfspec.drafts.PromptLookup(), EXIT, selfspec.drafts.LayerSkip([1], [2])])
def test_wider_programs_serve_chains_as_long_as_there_are_slots(
    llama: PreTrainedModel, draft: selfspec.drafts.Drafter | None
) -> None:
    runtime = _InThrees()
    spec = wrapped(llama, runtime, draft)
    for new in (NEW, NEW + 1):
        assert_stock(spec, tiny.prompt(PROMPT), new)
    assert ragged_samples(spec, PROMPT, NEW) == ragged_samples(wrapped(llama, Eager(), draft), PROMPT, NEW)
    assert not spec.programs.refusals
    assert 3 in runtime.ran
    assert min(runtime.left) >= 0


def test_a_longer_chains_program_serves_lengths_that_have_none_yet(llama: PreTrainedModel) -> None:
    spec = wrapped(llama, Costly(after=2, making_seconds=1.0), EXIT)
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=NEW, do_sample=False)
    programs: Any = spec.programs.bound_to(llama)
    long = next(kind for kind in programs.candidates if kind.width > 1)
    long, short = replace(long, width=8), replace(long, width=6)
    programs.candidates.clear()
    made = programs.candidates.setdefault(long, _Candidate(proved=True, seconds=[1.6, 1.7]))
    assert programs.serving(short, 9) == short
    seldom = programs.candidates.setdefault(short, _Candidate())
    assert programs.serving(short, long.width - 1) == short
    assert programs.serving(replace(short, rows=2), 9) == replace(short, rows=2)
    # A program of its own could save a quarter of these passes: it is made when that is as much as making it takes.
    assert [programs.serving(short, 9).width for _ in range(4)] == [8, 8, 8, 6]
    assert seldom.passes == 0
    seldom.waited, made.proved = 0.0, False
    assert programs.serving(short, 9) == short


def test_the_longest_chain_gets_its_program_first(llama: PreTrainedModel) -> None:
    spec = wrapped(llama, Again(after=3), EXIT)
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=4, do_sample=False)
    programs: Any = spec.programs.bound_to(llama)
    long = next(kind for kind in programs.candidates if kind.width > 1)
    long, short = replace(long, width=8), replace(long, width=6)
    tensors: Any = SimpleNamespace(slots=SimpleNamespace(visible=torch.ones(9)))
    programs.candidates.clear()
    for kind in (short, short, long, short):
        assert programs.serving(kind, 9) == kind
        programs.run(kind, tensors, kind.width, stock=lambda: None, function=lambda: pytest.fail("too soon"))
    # Passes of both count, and its program will serve both.
    assert {kind.width: each.passes for kind, each in programs.candidates.items()} == {6: 3, 8: 4}
    assert (programs.serving(short, 9), programs.serving(short, 7)) == (long, short)


@dataclass(frozen=True)
class _Planted(Again):
    runs: int = 0
    does: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = tuple

    def program(self, function: PassFunction, example: PassTensors) -> Function:
        calls = count()
        return lambda tensors: (self.does if next(calls) >= self.runs else tuple)(function(tensors))


def _raise(_: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    raise RuntimeError("planted")


@pytest.mark.parametrize("runs", [0, 1, 2])
@pytest.mark.parametrize(
    ("does", "reason"),
    [(lambda outputs: (outputs[0] + 1e-12, *outputs[1:]), "something else"), (_raise, "RuntimeError: planted")],
)
def test_what_gives_other_bits_or_fails_is_never_used(
    llama: PreTrainedModel, does: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]], reason: str, runs: int
) -> None:
    spec = wrapped(llama, _Planted(0, runs, does), EXIT)
    assert_stock(spec, tiny.prompt(PROMPT), NEW)
    assert not spec.programs.proved
    assert reason in next(iter(spec.programs.refusals.values()))


@pytest.mark.parametrize("error", [RuntimeError, StopIteration, UnsupportedModelError])
def test_a_proved_program_that_fails_is_used_no_more(llama: PreTrainedModel, error: type[Exception]) -> None:
    calls = count()

    def fail(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        next(calls)
        raise error("planted")

    before = Snapshot(llama)
    spec = wrapped(llama, _Planted(0, 6, fail))
    for _ in range(2):
        assert_stock(spec, tiny.prompt(PROMPT), NEW)
    assert next(calls) == 1
    assert list(spec.programs.refusals.values()) == [f"{error.__name__}: planted"]
    assert not spec.programs.proved
    before.assert_same(llama)


def test_a_program_without_memory_is_made_again_later(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.runtime.graph_cache.LATER", 2)
    calls = count()

    def fail(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if next(calls) == 0:
            raise torch.OutOfMemoryError("no room")
        return outputs

    spec = wrapped(llama, _Planted(0, 6, fail))
    for _ in range(2):
        assert_stock(spec, tiny.prompt(PROMPT), NEW)
    assert next(calls) > 1
    assert spec.programs.proved
    assert not spec.programs.refusals


def test_what_writes_other_keys_and_values_does_no_harm(llama: PreTrainedModel) -> None:
    @dataclass(frozen=True)
    class Scribbling(Again):
        def program(self, function: PassFunction, example: PassTensors) -> Function:
            def scribble(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                outputs = function(tensors)
                for buffer in tensors[4:]:
                    buffer.index_fill_(2, tensors[1][0], 7.0)
                return tuple(output + 1 for output in outputs)

            return scribble

    spec = wrapped(llama, Scribbling(0))
    assert_stock(spec, tiny.prompt(PROMPT), NEW)
    assert spec.programs.refusals


@dataclass(frozen=True)
class _BoundToLength(Again):
    """Programs that hold for the number of slots they were made over, and none other."""

    calls: list[int] = field(default_factory=list, compare=False)

    def program(self, function: PassFunction, example: PassTensors) -> Function:
        wanted = example.slots.visible.shape[0]

        def run(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            length = tensors[3].shape[0]
            self.calls.append(length)
            return tuple(output + (length != wanted) for output in function(tensors))

        return run


def test_passes_that_always_see_as_many_slots_are_compared_a_few_times_and_for_no_other_number(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = _BoundToLength(0)
    spec = wrapped(llama, runtime)
    stock = mock.Mock(wraps=ModelRunner._run_stock)
    monkeypatch.setattr(ModelRunner, "_run_stock", lambda *given: stock(*given))
    for prompt, runs in ((tiny.prompt(PROMPT), 6), (tiny.prompt(PROMPT, seed=1), 2), (tiny.prompt(PROMPT + 1), 1)):
        for _ in range(runs):
            assert_stock(spec, prompt, 2)
    # Three comparisons, and one over another number of slots, after which the pass was run once more.
    assert runtime.calls == [PROMPT + 1] * 8 + [PROMPT + 2]
    assert stock.call_count == 3 + 2
    assert "something else" in next(iter(spec.programs.refusals.values()))


def test_what_takes_longer_is_not_used(llama: PreTrainedModel) -> None:
    spec = wrapped(llama, Again(after=0))
    ticks = count()
    spec.programs = GraphCache(spec.runtime, lambda: float(next(ticks)) ** 2)
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=NEW, do_sample=False)
    assert not spec.programs.proved
    assert set(spec.programs.refusals.values()) == {"it took longer than the stock modules"}


@pytest.mark.parametrize(
    "reads",
    [
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.sum().item(),
        lambda tensor: bool(tensor.any()),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: [int(number) for number in tensor],
    ],
    ids=["tolist", "item", "bool", "numpy", "nonzero", "mask", "int"],
)
def test_reading_values_is_seen(reads: Callable[[Tensor], object]) -> None:
    with pytest.raises(UnsupportedModelError, match="depends on values"):
        run_watched(lambda: reads(torch.arange(3)))


# When a program has given what the stock modules gave.


@pytest.mark.parametrize(
    ("change", "closes"),
    [
        (lambda logits: logits * (1 + 1e-6), True),
        (lambda logits: logits * (1 + 1e-3), False),
        (lambda logits: logits.roll(1, -1), False),
        (lambda logits: torch.full_like(logits, torch.nan), False),
        (lambda logits: logits.float(), False),
        (lambda logits: logits[:1], False),
    ],
    ids=["rounding", "more", "another order", "nan", "another dtype", "another shape"],
)
def test_rounding_is_distinguished_from_all_else(change: Callable[[Tensor], Tensor], closes: bool) -> None:
    logits = torch.randn(2, 3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 0] = -torch.inf
    assert close((change(logits),), (logits,)) is closes
    assert not close((logits, logits), (logits,))
    # Drafts may be further off.
    for error, near in ((0.24, True), (0.26, False)):
        assert close((logits[1:] * (1 + error),), (logits[1:],), 0.25) is near


NODES, BUCKET = 4, 8
FULL = LayerPath.full(tiny.DEPTH)
TREES = [Tree((-1, -1, 0, 0)), Tree((-1, 0, 0, 2)), Tree((-1, -1, -1, 1)), Tree((-1, -1, 0)), Tree((-1, -1))]


class Generation:
    """Rounds over a cache, by programs or without them."""

    def __init__(self, model: PreTrainedModel, graphs: GraphCache | None, bucket: int) -> None:
        self.cache = SharedCache(tiny.DEPTH, 1, 64, NODES, torch.device("cpu"), bucket=bucket)
        self.runner = runner_for(model, ADAPTERS[model.config.model_type], self.cache, graphs)
        self.cache.cursors.reserve(PROMPT + 1)
        self.runner.prefill(tiny.prompt(PROMPT), [PROMPT])
        self.cache.commit([PROMPT])

    def round(self, tree: Tree, seed: int) -> Tensor:
        """Logits of all nodes; the path to the last one is committed."""
        self.cache.cursors.reserve(max(self.cache.seq_lens) + 1)
        self.cache.open(tree)
        logits = self.runner.run(PassRequest(FULL, tiny.prompt(len(tree) + 1, seed=seed))).logits
        self.cache.commit_paths([(-1, *tree.paths[-1])])
        return logits


@torch.no_grad()
def test_one_recording_serves_for_trees_of_many_sizes(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    graphs = GraphCache(StandIn(0, BUCKET), ticking())
    recorded, stock = (Generation(model, each, graphs.runtime.bucket) for each in (graphs, None))
    for seed in range(16):
        tree = TREES[seed % len(TREES)]
        # It reads more tokens, with which sums may have other last bits.
        torch.testing.assert_close(recorded.round(tree, seed), stock.round(tree, seed), rtol=1e-10, atol=1e-10)
    (kind,) = graphs.proved
    assert (kind.nodes, kind.width) == (7, 8)
    assert not graphs.refusals


@torch.no_grad()
def test_an_open_chain_runs_what_runs_where_nothing_is_opened(llama: PreTrainedModel) -> None:
    graphs = GraphCache(StandIn(0, BUCKET), ticking())
    generation = Generation(llama, graphs, BUCKET)
    for seed in range(6):
        generation.round(Tree.chain(NODES), seed)
        generation.runner.run(PassRequest(FULL, tiny.prompt(NODES + 1)))
    (kind,) = graphs.proved
    assert kind.nodes is None


class ByGraph(AnyRounds):
    """Windows too."""

    architecture = "mistral"
    kernels = ("sdpa",)
    bucket = BUCKET

    def graphs(self, model: PreTrainedModel) -> GraphCache:
        return _graphs_of(model)


@functools.cache
def _graphs_of(model: PreTrainedModel) -> GraphCache:
    return GraphCache(StandIn(0, BUCKET), ticking())


TestAnyRoundsByGraph = pytest.mark.contract(any_rounds(ByGraph, 6))
