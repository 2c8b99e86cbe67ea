"""Compiled passes: the same tokens for every architecture, over any number of slots, and nothing taken for granted."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import GraphModule
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.captures import Interpreted
from helpers.proving import as_stock, ragged_samples, ticking
from helpers.snapshot import Snapshot
from selfspec.errors import UnsupportedOptionError
from selfspec.model.layer_path import LayerPath
from selfspec.runtime import Compiled, Eager, Runtime
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.pass_function import PassFunction, PassKind, PassTensors
from selfspec.runtime.runtime import Function, OtherSizesError

PROMPT, NEW = 5, 20
EXIT = selfspec.drafts.EarlyExit(1)
DRAFTS = {
    "plain": None,
    "sublayers": selfspec.drafts.LayerSkip(attention=[1], mlp=[2]),
    "look-up": selfspec.drafts.PromptLookup(),
    "int8": selfspec.drafts.LowPrecision(),
}


def _wrapped(
    model: PreTrainedModel, draft: selfspec.drafts.Drafter | None = None, runtime: Runtime | None = None
) -> selfspec.SelfSpeculative:
    spec = selfspec.wrap(model, draft, draft_length=1, runtime=runtime or Interpreted(0))
    spec.programs = GraphCache(spec.runtime, ticking())
    return spec


def _check_greedy(
    model: PreTrainedModel, draft: selfspec.drafts.Drafter | None, runtime: Runtime | None = None
) -> None:
    before = Snapshot(model)
    spec = _wrapped(model, draft, runtime)
    prompt = tiny.prompt(PROMPT)
    found = spec.generate(prompt, max_new_tokens=NEW, do_sample=False).sequences
    assert found.tolist() == model.generate(prompt, max_new_tokens=NEW, do_sample=False).tolist()
    assert not spec.programs.refusals
    assert spec.programs.proved
    before.assert_same(model)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name in ("bitnet", "gpt2") else pytest.mark.contract)
        for name in sorted(tiny.BUILDERS)
    ],
)
def test_greedy_text_is_the_stock_models(architecture: str) -> None:
    _check_greedy(tiny.BUILDERS[architecture](), EXIT)


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.compile
def test_greedy_text_of_every_draft_is_the_stock_models(draft: selfspec.drafts.Drafter | None) -> None:
    _check_greedy(tiny.llama(attention="eager"), draft)


@pytest.mark.parametrize("draft", [None, EXIT], ids=["plain", "exit"])
@pytest.mark.compile
def test_greedy_text_is_the_stock_models_when_it_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft: selfspec.drafts.Drafter | None
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    _check_greedy(tiny.llama(), draft, Compiled(0))


@pytest.mark.compile
def test_samples_of_a_ragged_batch_are_those_of_the_stock_modules(llama: PreTrainedModel) -> None:
    tokens: list[list[list[int]]] = []
    for runtime in (Eager(), Interpreted(0)):
        spec = _wrapped(llama, EXIT, runtime)
        tokens.append(ragged_samples(spec, PROMPT, NEW))
    assert tokens[0] == tokens[1]
    assert any(not kind.uniform for kind in spec.programs.proved)


@pytest.mark.compile
def test_one_graph_serves_any_number_of_slots_and_alike_layers(llama: PreTrainedModel) -> None:
    runtime = Interpreted(0)
    spec = _wrapped(llama, runtime=runtime)
    prompt = tiny.prompt(PROMPT)
    for new in (NEW, 90):
        expected = llama.generate(prompt, max_new_tokens=new, do_sample=False).tolist()
        assert spec.generate(prompt, max_new_tokens=new, do_sample=False).sequences.tolist() == expected
    assert spec.programs.proved
    (graph,) = runtime.graphs
    shared = [node for node in graph.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
    assert len(shared) == tiny.DEPTH
    assert len({node.args[0].target for node in shared}) == 1


def test_a_pass_over_the_first_slot_alone_is_the_modules(llama: PreTrainedModel) -> None:
    spec = _wrapped(llama)
    prompt = tiny.prompt(1)
    expected = llama.generate(prompt, max_new_tokens=NEW, do_sample=False).tolist()
    for _ in range(2):
        assert spec.generate(prompt, max_new_tokens=NEW, do_sample=False).sequences.tolist() == expected
    assert spec.programs.proved
    assert not spec.programs.refusals


def test_sizes_that_a_pass_was_not_compiled_for_are_reported(llama: PreTrainedModel) -> None:
    """A pass over all the slots there are sees memory that lies otherwise; one over a single slot is its own case."""
    spec = _wrapped(llama)
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=NEW, do_sample=False)
    (candidate,) = spec.programs._candidates.values()
    assert candidate.program is not None
    passes = candidate.program.function
    buffers = (torch.zeros(1, 2, 12, 8, dtype=torch.float64),) * (2 * tiny.DEPTH)
    for slots, holds in ((1, False), (2, True), (11, True), (12, False)):
        written = torch.tensor([[slots - 1]])
        tensors = (torch.ones(1, 1, dtype=torch.long), written, written, torch.arange(slots), *buffers)
        if holds:
            passes(tensors)
        else:
            with pytest.raises(OtherSizesError):
                passes(tensors)


def test_a_layer_that_uses_its_number_is_no_others(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = type(llama.model.layers[0])
    forward = kind.forward

    def numbered(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(layer, *args, **kwargs) * (1.0 + layer.self_attn.layer_idx / 8)

    monkeypatch.setattr(kind, "forward", as_stock(numbered, kind))
    _check_greedy(llama, None)


def test_a_cache_is_free_when_its_generation_ends(llama: PreTrainedModel) -> None:
    seen: list[weakref.ref[Tensor]] = []

    @dataclass(frozen=True)
    class Noting(Interpreted):
        def program(self, function: PassFunction, example: PassTensors) -> Function:
            seen.extend(map(weakref.ref, example.slots.buffers))
            return super().program(function, example)

    spec = _wrapped(llama, runtime=Noting(0))
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=2, do_sample=False)
    gc.collect()
    assert len(seen) == 2 * tiny.DEPTH
    assert [candidate.program is not None for candidate in spec.programs._candidates.values()] == [True]
    assert [ref for ref in seen if ref() is not None] == []


KIND = PassKind(
    path=LayerPath.full(2),
    head=None,
    base=None,
    rows=1,
    width=1,
    uniform=True,
    masked=False,
    nodes=None,
    windowed=False,
    padded=False,
    entering=None,
)


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
    assert Compiled().agree(KIND, (change(logits),), (logits,)) is closes
    assert not Compiled().agree(KIND, (logits, logits), (logits,))


def test_what_gives_something_else_is_never_used(llama: PreTrainedModel) -> None:
    @dataclass(frozen=True)
    class Wrong(Interpreted):
        def lowered(self, graph: GraphModule, example: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
            return lambda *tensors: tuple(output * 1.01 for output in graph(*tensors))

    spec = _wrapped(llama, EXIT, Wrong(0))
    prompt = tiny.prompt(PROMPT)
    found = spec.generate(prompt, max_new_tokens=NEW, do_sample=False).sequences
    assert found.tolist() == llama.generate(prompt, max_new_tokens=NEW, do_sample=False).tolist()
    assert not spec.programs.proved
    assert set(spec.programs.refusals.values()) == {"it gave something else than the stock modules"}


@pytest.mark.parametrize("tracing", [True, False], ids=["while it was traced", "while it was lowered"])
def test_nothing_is_left_of_a_compilation_that_failed(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tracing: bool
) -> None:
    @dataclass(frozen=True)
    class Failing(Compiled):
        def lowered(self, graph: GraphModule, example: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
            raise MemoryError("planted")

    # What torch's compiler keeps for itself is there before.
    gc.collect()
    others = [thing for thing in gc.get_objects() if issubclass(type(thing), FakeTensor)]
    norm: Any = type(llama.model.norm)
    forward, fake = norm.forward, FakeTensor

    def failing(module: Any, states: Tensor) -> Tensor:
        if tracing and isinstance(states, fake):
            raise MemoryError("planted")
        normed: Tensor = forward(module, states)
        return normed

    monkeypatch.setattr(norm, "forward", as_stock(failing, norm))
    before = Snapshot(llama)
    spec = _wrapped(llama, EXIT, Failing(0))
    prompt = tiny.prompt(PROMPT)
    found = spec.generate(prompt, max_new_tokens=NEW, do_sample=False).sequences
    assert found.tolist() == llama.generate(prompt, max_new_tokens=NEW, do_sample=False).tolist()
    assert set(spec.programs.refusals.values()) == {"MemoryError: planted"}
    before.assert_same(llama)
    gc.collect()
    assert sum(issubclass(type(thing), FakeTensor) for thing in gc.get_objects()) == len(others)


def test_packed_weights_are_left_to_the_modules() -> None:
    model = tiny.llama().float()
    selfspec.runtime.pack(model)
    spec = _wrapped(model)
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=NEW, do_sample=False)
    assert {"packed weights are not compiled" in reason for reason in spec.programs.refusals.values()} == {True}


def test_a_missing_compiler_is_said_before_work_starts(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UnsupportedOptionError, match=r"C\+\+ compiler.*leave the runtime out"):
        _wrapped(llama).generate(tiny.prompt(PROMPT), max_new_tokens=NEW)
