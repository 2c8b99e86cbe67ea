"""Paths and gates: a gated pass equals a stock model that was cut, thinned or zeroed by hand; hooks see what runs."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from helpers import tiny
from helpers.reference import Bench, layers_of, logits_after, sublayer_module, watched, with_layers, zeroed
from helpers.tiny import in_turns
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache
from selfspec.errors import UnsupportedModelError
from selfspec.model.gated_view import GatedModel
from selfspec.model.layer_path import LayerPath, Part, Sublayer, sublayers

ALL = sublayers(tiny.DEPTH)
BATCH = 2
PAST = 9  # longer than the sliding window
BLOCK = 5
EXACT = 1e-9

SKIP_SETS = [[s] for s in ALL] + [
    [Sublayer(0, Part.ATTENTION), Sublayer(2, Part.MLP)],
    [Sublayer(1, Part.MLP), Sublayer(2, Part.ATTENTION), Sublayer(3, Part.ATTENTION)],
    [Sublayer(1, Part.ATTENTION), Sublayer(1, Part.MLP), Sublayer(3, Part.MLP)],
]


SETTINGS = {"sdpa": ("sdpa", 0), "sdpa, past in the cache": ("sdpa", PAST), "eager, past in the cache": ("eager", PAST)}
CASES = in_turns(sorted(tiny.BUILDERS), SETTINGS)


@pytest.fixture(params=[pytest.param(each.values, id=each.id, marks=each.marks) for each in CASES])
def case(request: pytest.FixtureRequest) -> tuple[str, tuple[str, int]]:
    """An architecture, and a kernel with a length of the past."""
    architecture, setting = request.param
    return architecture, setting


@pytest.fixture
def past(case: tuple[str, tuple[str, int]]) -> int:
    return case[1][1]


@pytest.fixture
def model(case: tuple[str, tuple[str, int]]) -> PreTrainedModel:
    return _model(case[0], case[1][0])


@functools.cache
def _model(architecture: str, kernel: str) -> PreTrainedModel:
    return tiny.BUILDERS[architecture](attention=kernel)


def bench_of(model: PreTrainedModel, past: int) -> Bench:
    cache = SharedCache(tiny.DEPTH, BATCH, limit=past + BLOCK + 1, slack=BLOCK, device=torch.device("cpu"))
    return Bench(model, ADAPTERS[model.config.model_type], cache, tiny.prompt(past + BLOCK, BATCH), past)


def equal(found: Any, wanted: Any, of: object = "") -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=EXACT, msg=lambda said: f"{of}: {said}")


def test_an_early_exit_is_the_model_cut_there_without_any_cache(architecture: str) -> None:
    for exit_layer in (1, 3):
        model = _model(architecture, "sdpa")
        view = GatedModel(
            model, ADAPTERS[architecture], LayerPath.up_to(tiny.DEPTH, Sublayer(exit_layer, Part.ATTENTION))
        )
        tokens = tiny.prompt(12, BATCH)
        with torch.no_grad():
            equal(view.module(tokens, use_cache=False).logits, with_layers(model, range(exit_layer))(tokens).logits)
            # By keyword, with a padding mask and with a stock cache, it is called like the model too.
            mask = torch.ones_like(tokens)
            mask[0, :3] = 0
            found = view.module(input_ids=tokens, attention_mask=mask, use_cache=True).logits
            wanted = with_layers(model, range(exit_layer))(input_ids=tokens, attention_mask=mask, use_cache=True).logits
            equal(found[mask.bool()], wanted[mask.bool()])


def test_a_skipped_sublayer_adds_nothing(model: PreTrainedModel, past: int) -> None:
    for skipped in SKIP_SETS:
        bench = bench_of(model, past)
        found = bench.logits(LayerPath.without(tiny.DEPTH, skipped))
        wanted = logits_after(model, bench.prefix, bench.block, reference=zeroed(model, skipped))
        assert (wanted - logits_after(model, bench.prefix, bench.block)).abs().max() > 1e-2
        equal(found, wanted, skipped)


def test_resuming_at_any_sublayer_is_the_full_pass(model: PreTrainedModel, past: int) -> None:
    wanted = bench_of(model, past)
    logits = wanted.logits(wanted.full)
    for start in ALL[1:]:
        paths = (LayerPath.up_to(tiny.DEPTH, start), LayerPath.without(tiny.DEPTH, [start]))
        for first, stepped in itertools.product(paths, (False, True)):
            bench = bench_of(model, past)
            left: Any = bench.steps(first)[1] if stepped else bench.states(first)
            assert (not left.attention) == (start.part is Part.ATTENTION)
            # It reads the states that it is given, and not the tokens.
            found = bench.logits(bench.full.resumed_at(start), torch.zeros_like(bench.block), left)
            equal(found, logits, (first, stepped))
            # And the cache holds what a full pass would have left, so the next tokens are right too.
            equal(bench.keys_and_values(), wanted.keys_and_values())


def test_a_pass_writes_the_cache_only_in_layers_whose_attention_it_runs(model: PreTrainedModel) -> None:
    for path in (
        LayerPath.up_to(tiny.DEPTH, Sublayer(2, Part.ATTENTION)),
        LayerPath.up_to(tiny.DEPTH, Sublayer(1, Part.MLP)),
        LayerPath.without(tiny.DEPTH, [Sublayer(0, Part.ATTENTION), Sublayer(2, Part.MLP)]),
        LayerPath.full(tiny.DEPTH).resumed_at(Sublayer(2, Part.MLP)),
    ):
        bench = bench_of(model, PAST)
        entering = None if path.start is None else bench.states(LayerPath.up_to(tiny.DEPTH, path.start))
        before = bench.keys_and_values()
        bench.logits(path, tiny.prompt(BLOCK, BATCH, seed=9), entering)
        for layer, (found, old) in enumerate(zip(bench.keys_and_values(), before, strict=True)):
            assert torch.equal(found[0][:, :, :PAST], old[0][:, :, :PAST])
            assert torch.equal(found[1][:, :, :PAST], old[1][:, :, :PAST])
            written = not torch.equal(found[0], old[0])
            assert written == path.runs(Sublayer(layer, Part.ATTENTION)), layer


# What a user hung on the model's modules.


def test_hooks_that_change_what_passes_change_a_resumed_pass_as_they_change_a_full_one(architecture: str) -> None:
    model = copy.deepcopy(_model(architecture, "sdpa"))

    def louder(module: object, args: object, output: Any) -> Any:
        return (output[0] * 1.25, *output[1:]) if isinstance(output, tuple) else output * 1.25

    def shifted(
        module: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (args[0] + 0.125, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + 0.125}

    tokens = tiny.prompt(PAST + BLOCK, BATCH)
    split = tokens[:, :PAST], tokens[:, PAST:]
    plain = logits_after(model, *split)
    for sublayer in ALL:
        sublayer_module(model, sublayer).register_forward_hook(louder)
        sublayer_module(model, sublayer).register_forward_pre_hook(shifted, with_kwargs=True)
    for layer in layers_of(model):
        layer.register_forward_hook(louder)
        layer.register_forward_pre_hook(shifted, with_kwargs=True)
    wanted = logits_after(model, *split)
    assert (wanted - plain).abs().max() > 1e-2
    for start in ALL[1:]:
        bench = bench_of(model, PAST)
        left = bench.states(LayerPath.up_to(tiny.DEPTH, start))
        equal(bench.logits(bench.full.resumed_at(start), entering=left), wanted, start)


def test_hooks_hung_on_or_taken_off_after_a_view_was_made_count(llama: PreTrainedModel) -> None:
    path = LayerPath.without(tiny.DEPTH, [Sublayer(1, Part.ATTENTION)])
    view = GatedModel(llama, ADAPTERS["llama"], path)
    fired: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: fired.append(name))
        for name, module in llama.named_modules()
        if name in ("", "model", "model.layers.1", "model.layers.1.mlp", "model.layers.2", "lm_head")
    ]
    with torch.no_grad():
        view.module(tiny.prompt(3), use_cache=False)
        assert sorted(fired) == ["", "lm_head", "model", "model.layers.1", "model.layers.1.mlp", "model.layers.2"]
        for handle in handles:
            handle.remove()
        view.module(tiny.prompt(3), use_cache=False)
    assert len(fired) == 6


# Forwards that something else shadowed before us.


def _keyword_partial(module: Any) -> Any:
    stock = type(module).forward
    return functools.partial(lambda *args, me, **kwargs: stock(me, *args, **kwargs), me=module)


SHADOWS: dict[str, Callable[[Any], Any]] = {
    "method": lambda module: type(module).forward.__get__(module),
    "partial": lambda module: functools.partial(_around(type(module).forward), module),
    "keyword partial": _keyword_partial,
    "closure": lambda module: _around(module.forward),
    "wrapped": lambda module: functools.wraps(module.forward)(_around(module.forward)),
}


def _around(stock: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: stock(*args, **kwargs)


@pytest.mark.parametrize("where", ["", "model", "model.layers.1", "model.layers.1.self_attn"])
@pytest.mark.parametrize("shadow", [*SHADOWS, "compiled"])
def test_a_gate_holds_or_refuses_though_something_shadowed_forward_before(
    llama: PreTrainedModel, shadow: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a compiled module runs does not matter here, only through which door it is entered: a function, as compiled.
    monkeypatch.setattr(torch, "compile", lambda function: lambda *args, **kwargs: function(*args, **kwargs))
    path = LayerPath.without(tiny.DEPTH, [Sublayer(1, Part.ATTENTION)])
    wanted = zeroed(llama, path.skipped)
    module = llama.get_submodule(where)
    if shadow == "compiled":
        module.compile()
    else:
        module.forward = SHADOWS[shadow](module)
    shadowed = dict(module.__dict__)
    calls = watched(llama)
    try:
        view = GatedModel(llama, ADAPTERS["llama"], path)
    except UnsupportedModelError:
        return
    tokens = tiny.prompt(7)
    with torch.no_grad():
        equal(view.module(tokens, use_cache=False).logits, wanted(tokens).logits)
    assert calls.calls[Sublayer(1, Part.ATTENTION)] == 0
    assert calls.calls[1] == 1
    assert module.__dict__.get("forward") == shadowed.get("forward")


@given(st.sets(st.sampled_from(ALL), min_size=1))
def test_a_skip_set_hands_over_at_the_first_it_skips_unless_nothing_comes_before(skipped: set[Sublayer]) -> None:
    path = LayerPath.without(tiny.DEPTH, skipped)
    first = next(s for s in ALL if s in skipped)
    assert path.resume_point == (None if first == ALL[0] else first)
    assert all(path.runs(s) for s in ALL[: ALL.index(first)])
