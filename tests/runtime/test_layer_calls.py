"""Layers as calls in a program: alike ones share a function, others do not, and nothing that is written gets lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from helpers import tiny
from helpers.proving import as_stock
from selfspec.cache.shared_cache import SharedCache
from selfspec.kernels.rounded import Precision
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath, Part, Sublayer, sublayers
from selfspec.model.registry import find_adapter
from selfspec.runtime import Traced
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.layer_calls import alike
from selfspec.runtime.pass_function import PassFunction, PassTensors
from selfspec.runtime.recordable import frozen_view
from selfspec.runtime.recorded import RecordedRunner, runner_for
from selfspec.runtime.runner import PassCall

PROMPT = 9
EXIT = Sublayer(3, Part.ATTENTION)


@dataclass
class Bench:
    """A runner over a cache that holds a prompt, and what a pass of some kind would be recorded as."""

    model: PreTrainedModel
    cache: SharedCache
    runner: RecordedRunner

    @classmethod
    def of(cls, model: PreTrainedModel) -> Bench:
        cache = SharedCache(tiny.DEPTH, 1, 64, 16, torch.device("cpu"))
        passes = runner_for(model, find_adapter(model), cache, GraphCache(Traced(after=0)))
        assert isinstance(passes, RecordedRunner)
        with torch.no_grad():
            cache.reserve(PROMPT)
            passes.prefill(tiny.prompt(PROMPT), [PROMPT])
            cache.commit([PROMPT])
        return cls(model, cache, passes)

    def recordable(
        self, path: LayerPath, width: int, entering: ExactStates | None = None, base: str | None = None
    ) -> tuple[PassFunction, PassTensors]:
        tokens = tiny.prompt(width, seed=1)
        slots = self.cache.slots(width)
        assert slots is not None
        kind = self.runner._kind(PassCall(path, tokens, entering=entering, base=base), slots)
        return self.runner._function(kind, self.runner._programs.runtime), PassTensors(tokens, entering, slots)


def groups(model: PreTrainedModel, path: LayerPath | None = None) -> list[list[int]]:
    """Numbers of the layers that are alike after a pass over three tokens."""
    function, tensors = Bench.of(model).recordable(path or LayerPath.full(tiny.DEPTH), 3)
    with torch.no_grad():
        function(tensors.flat())
    return [[call.index for call in group] for group in alike(function.layers)]


def test_layers_that_differ_in_weights_alone_are_alike() -> None:
    assert groups(tiny.llama()) == [[0, 1, 2, 3]]
    assert groups(tiny.gpt2()) == [[0, 1, 2, 3]]


def test_layers_that_attend_otherwise_are_not() -> None:
    assert groups(tiny.qwen2()) == [[0, 1], [2, 3]]


def test_what_a_layer_holds_besides_weights_counts() -> None:
    model = tiny.llama()
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5
    assert groups(model) == [[0, 2, 3]]
    model.model.layers[2].mlp.act_fn = nn.ReLU()
    assert groups(model) == [[0, 3]]
    model.model.layers[3].mlp.down_proj.bias = nn.Parameter(torch.zeros(32, dtype=torch.float64))
    assert groups(model) == []


def test_layers_that_a_path_leaves_out_or_ends_in_are_not_called() -> None:
    depth = tiny.DEPTH
    assert groups(tiny.llama(), LayerPath.up_to(depth, EXIT)) == [[0, 1, 2]]
    assert groups(tiny.llama(), LayerPath.without(depth, [Sublayer(1, Part.MLP)])) == [[0, 2, 3]]


def test_a_layer_may_read_others_while_the_stock_model_keeps_its_own() -> None:
    model = tiny.llama()
    rotary = model.model.rotary_emb
    frozen = frozen_view(rotary)
    frozen._buffers["inv_freq"] = torch.zeros(1)
    assert rotary.inv_freq.shape != frozen.inv_freq.shape


def test_layers_with_substitutes_are_alike_and_those_with_fewer_are_not() -> None:
    whole = LayerPath.full(tiny.DEPTH)
    assert groups(tiny.llama(), in_eight_bits(whole)) == [[0, 1, 2, 3]]
    but_one = [each for each in sublayers(tiny.DEPTH) if each != Sublayer(1, Part.MLP)]
    assert groups(tiny.llama(), whole.with_substitutes(EIGHT, but_one, head=False)) == [[0, 2, 3]]
    assert groups(tiny.llama(), in_eight_bits(LayerPath.without(tiny.DEPTH, [Sublayer(1, Part.MLP)]))) == [[0, 2, 3]]


def test_nothing_else_holds_the_substitutes_of_a_layer_that_is_recorded() -> None:
    bench = Bench.of(tiny.llama())
    function, _ = bench.recordable(in_eight_bits(LayerPath.full(tiny.DEPTH)), 3)
    shared = [made.substitute for made in bench.runner.substitutes._made.values()]
    holders = {id(part._parameters) for each in shared if each is not None for part in each.modules()}
    mine = {id(part._parameters) for call in function.layers for part in call.layer.modules()}
    assert holders
    assert mine
    assert not holders & mine


EIGHT = Precision(8, 32)


def in_eight_bits(path: LayerPath) -> LayerPath:
    return path.with_substitutes(EIGHT, sublayers(tiny.DEPTH), head=True)


PASSES = {
    "in 8 bits": in_eight_bits(LayerPath.full(tiny.DEPTH)),
    "full": LayerPath.full(tiny.DEPTH),
    "draft": LayerPath.up_to(tiny.DEPTH, EXIT),
    "resumed": LayerPath.full(tiny.DEPTH).resumed_at(Sublayer(1, Part.ATTENTION)),
}


@pytest.mark.parametrize("base", [None, "model"])
@pytest.mark.parametrize("name", PASSES)
def test_a_program_of_calls_gives_and_writes_the_same(name: str, base: str | None) -> None:
    path = PASSES[name]
    hidden = torch.randn(1, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    entering = None if path.start is None else ExactStates(hidden)
    bench = Bench.of(tiny.llama())
    function, tensors = bench.recordable(path, 3, entering, base)
    flat = tensors.flat()

    def forget() -> None:
        for buffer in tensors.slots.buffers:
            buffer.index_fill_(2, tensors.slots.slot_mapping[0], 7.0)

    with torch.no_grad():
        forget()
        expected = function(flat)
        written = [buffer.clone() for buffer in tensors.slots.buffers]
        program = Traced().program(function, tensors)
        forget()
        found = program(flat)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, tensors.slots.buffers, written))


def test_calls_read_the_weights_of_their_own_layer() -> None:
    bench = Bench.of(tiny.llama())
    function, tensors = bench.recordable(LayerPath.full(tiny.DEPTH), 3)
    flat = tensors.flat()
    with torch.no_grad():
        before = function(flat)
        program = Traced().program(function, tensors)
        for layer in bench.model.model.layers:
            layer.mlp.down_proj.weight.mul_(1.5)
            found, expected = program(flat), function(flat)
            assert torch.equal(found[0], expected[0])
            assert not torch.equal(found[0], before[0])


def test_a_layer_that_uses_its_number_is_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    kind: Any = type(model.model.layers[0])
    forward = kind.forward

    def numbered(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(layer, *args, **kwargs) * (1.0 + layer.self_attn.layer_idx / 8)

    monkeypatch.setattr(kind, "forward", as_stock(numbered, kind))
    function, tensors = Bench.of(model).recordable(LayerPath.full(tiny.DEPTH), 3)
    flat = tensors.flat()
    names = _functions(monkeypatch)
    with torch.no_grad():
        expected = function(flat)
        found = Traced().program(function, tensors)(flat)
    assert names == ["program"]
    assert torch.equal(found[0], expected[0])


def test_one_function_serves_all_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    function, tensors = Bench.of(tiny.qwen2()).recordable(LayerPath.full(tiny.DEPTH), 3)
    names = _functions(monkeypatch)
    with torch.no_grad():
        function(tensors.flat())
        Traced().program(function, tensors)
    assert names == ["layer0", "layer1", "program"]
    assert all(call.function is None for call in function.layers)


def _functions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions of units made from now on."""
    names: list[str] = []
    unit = torch._C.CompilationUnit

    class Watched:
        def __init__(self) -> None:
            self._unit = unit()

        def create_function(self, name: str, *rest: Any) -> Any:
            names.append(name)
            return self._unit.create_function(name, *rest)

    monkeypatch.setattr(torch._C, "CompilationUnit", Watched)
    return names


def test_a_call_of_another_form_runs_the_layer_itself() -> None:
    function, tensors = Bench.of(tiny.llama()).recordable(LayerPath.full(tiny.DEPTH), 3)
    with torch.no_grad():
        function(tensors.flat())
        call = function.layers[0]
        call.function = pytest.fail
        hidden = torch.randn(1, 3, 32, dtype=torch.float64)
        angles = (torch.ones(1, 3, 8, dtype=torch.float64),) * 2
        found = call(hidden, position_embeddings=angles)
    assert isinstance(found if isinstance(found, Tensor) else found[0], Tensor)
