"""What a model is changed to after its passes were recorded: the text is the changed model's own, and back again."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from transformers import pytorch_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import selfspec
from helpers import tiny
from helpers.captures import StandIn, assert_stock, wrapped
from helpers.shrunken import shrunken
from selfspec.runtime import Eager, Native, Runtime
from selfspec.runtime.model_state import ModelState

PROMPT, NEW = 5, 10
Model = Any
Change = Callable[[Model], AbstractContextManager[Any]]


@contextmanager
def _set(*places: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _everywhere(kind: str, **values: Any) -> Change:
    """Attributes of all modules of a class, by the end of its name."""

    def change(model: Model) -> AbstractContextManager[None]:
        found = [module for module in model.modules() if type(module).__name__.endswith(kind)]
        assert found
        return _set(*((module, name, value) for module in found for name, value in values.items()))

    return change


def _patched(owner: Any, name: str) -> Change:
    """A function of a class or a module replaced, in the way of kernel libraries."""
    return lambda _: _set((owner, name, _otherwise(getattr(owner, name))))


def _otherwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives something else than this one."""

    @wraps(function)
    def otherwise(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        if isinstance(output, tuple):
            return output[0].flip(-1), *output[1:]
        return output.flip(-1)

    return otherwise


def _flipped(_: nn.Module, __: Any, output: Any) -> Any:
    return output.flip(-1) if isinstance(output, Tensor) else None


def _all_hooked(_: Model) -> AbstractContextManager[Any]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output.flip(-1) if type(module).__name__.endswith("MLP") else None

    return register_module_forward_hook(hook)


@contextmanager
def _in_place(*weights: Tensor) -> Iterator[None]:
    kept = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(-2)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before)


def _transposed(model: Model) -> AbstractContextManager[None]:
    weight = model.model.layers[1].self_attn.q_proj.weight
    return _set((weight, "data", weight.data.t()))


def _registered(_: Model) -> AbstractContextManager[None]:
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return _told(partial(ALL_ATTENTION_FUNCTIONS.register, "sdpa"), _otherwise(sdpa), sdpa)


def _other_layers(model: Model) -> AbstractContextManager[None]:
    layers = model.model.layers
    return _set((model.model, "layers", nn.ModuleList([layers[1], layers[0]])))


@contextmanager
def _other_forward(model: Model) -> Iterator[None]:
    mlp = model.model.layers[1].mlp
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(mlp), "forward", types.MethodType(_otherwise(type(mlp).forward), mlp))
        yield


CHANGES: dict[str, Change] = {
    "scaling": _everywhere("Attention", scaling=2.0),
    "activation": _everywhere("MLP", act_fn=nn.Tanh()),
    "class: mlp": _patched(modeling_llama.LlamaMLP, "forward"),
    "class: linear": _patched(nn.Linear, "forward"),
    "instance": _other_forward,
    "function: rotary": _patched(modeling_llama, "apply_rotary_pos_emb"),
    "function: below rotary": _patched(modeling_llama, "rotate_half"),
    "function: attention": _patched(functional, "scaled_dot_product_attention"),
    "kernel registered": _registered,
    "hook": lambda model: model.model.layers[1].mlp.register_forward_hook(_flipped),
    "hook of all": _all_hooked,
    "strides of a weight": _transposed,
    "weights elsewhere": lambda model: _set(*((weight, "data", weight.data * -2) for weight in model.parameters())),
    "weights in place": lambda model: _in_place(*model.parameters()),
    "buffers in place": lambda model: _in_place(*model.buffers()),
    "layers": _other_layers,
}
"""What happens to a tiny llama, each for a while."""


def _mixtral() -> Model:
    model = shrunken("mixtral")
    # Without a decision on which of them were chosen.
    model.set_experts_implementation("batched_mm")
    return model


def _gemma2() -> Model:
    return shrunken("gemma2", attn_implementation="eager")


OTHERS: dict[str, tuple[Callable[[], Model], Change]] = {
    "experts a token": (_mixtral, _everywhere("TopKRouter", top_k=1)),
    "cap of attention scores": (_gemma2, _everywhere("Attention", attn_logit_softcapping=0.01)),
    "cap of logits": (_gemma2, lambda model: _set((model.config, "final_logit_softcapping", 1e-3))),
    "weights beside a constant, in place": (_gemma2, lambda model: _in_place(*model.parameters())),
    "window": (
        lambda: tiny.mistral(num_hidden_layers=2),
        lambda model: _set((model.config, "sliding_window", 2)),
    ),
    "eager kernel": (lambda: tiny.llama(num_hidden_layers=2, attention="eager"), _patched(modeling_llama, "repeat_kv")),
    "class in gpt2": (lambda: tiny.gpt2(num_hidden_layers=2), _patched(pytorch_utils.Conv1D, "forward")),
}
"""The same of other architectures."""


@contextmanager
def _told(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


SETTINGS: dict[str, Change] = {
    "default dtype": lambda _: _told(torch.set_default_dtype, torch.float16, torch.float32),
    "deterministic": lambda _: _told(torch.use_deterministic_algorithms, True, False),
    "kernels of attention": lambda _: sdpa_kernel(SDPBackend.MATH),
    "autocast": lambda _: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda _: torch.device("cpu"),
    "attention kernel": lambda model: _set((model.config, "_attn_implementation", "eager")),
}
"""What torch is told for a while, which need not change the text."""


def _llama(dtype: torch.dtype = torch.float64) -> Model:
    return tiny.llama(num_hidden_layers=2, dtype=dtype)


def _text(spec: selfspec.SelfSpeculative) -> list[list[int]]:
    """The model's own text, which is also the wrapper's."""
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    expected: list[list[int]] = spec.model.generate(tiny.prompt(PROMPT), **options).tolist()
    assert spec.generate(tiny.prompt(PROMPT), **options).sequences.tolist() == expected
    return expected


def _check(model: Model, change: Change, runtime: Runtime, draft: selfspec.drafts.Drafter | None = None) -> None:
    """The text is the model's own before a change, with it, and after it, though programs were made."""
    spec = wrapped(model, runtime, draft)
    before = _text(spec)
    proved = spec.programs.proved
    assert bool(proved) == (not isinstance(runtime, Eager))
    with change(model):
        assert _text(spec) != before or change in SETTINGS.values()
    assert _text(spec) == before
    assert spec.programs.proved == proved


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_views_are_of_the_model_as_it_is(change: Change) -> None:
    _check(_llama(), change, Eager(), selfspec.drafts.EarlyExit(1))


GRAPHS = StandIn(0, 8)


@pytest.mark.parametrize("change", (CHANGES | SETTINGS).values(), ids=CHANGES | SETTINGS)
def test_graphs_are_of_the_model_as_it_is(change: Change) -> None:
    _check(_llama(), change, GRAPHS)


# Graphs are captured anew over every cache, native programs once.
@pytest.mark.kernels
@pytest.mark.parametrize("change", (CHANGES | SETTINGS).values(), ids=CHANGES | SETTINGS)
def test_programs_are_of_the_model_as_it_is(change: Change) -> None:
    _check(_llama(torch.float32), change, Native(0))


@pytest.mark.parametrize(("build", "change"), OTHERS.values(), ids=OTHERS)
def test_programs_of_other_architectures_too(build: Callable[[], Model], change: Change) -> None:
    _check(build(), change, GRAPHS)


def test_a_model_that_is_used_stays_what_it_was(architecture: str) -> None:
    model, prompt = tiny.BUILDERS[architecture](), tiny.prompt(PROMPT)
    spec = selfspec.wrap(model, runtime=GRAPHS)
    spec.generate(prompt, max_new_tokens=1, do_sample=False)
    state = ModelState(model)
    assert not state.others
    model.generate(prompt, max_new_tokens=NEW, do_sample=False)
    spec.generate(prompt, max_new_tokens=NEW, do_sample=False)
    model.generation_config.max_new_tokens = 3
    model.train().eval()
    assert state.holds()


@pytest.mark.parametrize("name", ["default dtype", "deterministic", "kernels of attention"])
def test_settings_of_torch_are_part_of_the_state(name: str) -> None:
    model = _llama()
    state = ModelState(model)
    with SETTINGS[name](model):
        assert not state.holds()
    assert state.holds()


def test_equal_values_are_as_good_as_the_same() -> None:
    model = _llama()
    state = ModelState(model)
    attention = model.model.layers[1].self_attn
    attention.scaling = attention.scaling * 1.0
    assert state.holds()
    attention.scaling += 1.0
    assert not state.holds()


def test_what_others_wrote_is_not_recorded() -> None:
    """Kernels of others may not be seen by what records, and leave memory as the last pass left it."""
    model = _llama()
    spec = selfspec.wrap(model, runtime=GRAPHS)
    with CHANGES["function: rotary"](model):
        spec.generate(tiny.prompt(PROMPT), max_new_tokens=NEW, do_sample=False)
        assert not spec.programs.proved
        assert not spec.programs.refusals


@pytest.mark.kernels
def test_a_function_mode_sees_every_pass() -> None:
    class Flipping(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            return output.flip(-1) if func is functional.silu else output

    _check(_llama(torch.float32), lambda _: Flipping(), Native(0))


def test_what_is_changed_within_a_generation_is_recorded_by_none() -> None:
    """The generation began with another model, and programs of its kinds would be taken for that one's."""
    model, prompt = _llama(), tiny.prompt(PROMPT)
    spec = wrapped(model, StandIn(3, 8))
    stream = spec.stream(prompt, max_new_tokens=NEW, do_sample=False)
    next(stream)
    with CHANGES["scaling"](model):
        stream.finish()
        assert not spec.programs.proved
    for _ in range(2):
        assert_stock(spec, prompt, NEW)
    assert spec.programs.proved


def test_generations_keep_the_programs_they_began_with() -> None:
    model, prompt = _llama(), tiny.prompt(PROMPT)
    spec = wrapped(model, GRAPHS)
    expected = model.generate(prompt, max_new_tokens=NEW, do_sample=False).tolist()
    stream = spec.stream(prompt, max_new_tokens=NEW, do_sample=False)
    next(stream)
    with CHANGES["scaling"](model):
        assert_stock(spec, prompt, NEW)
    assert stream.finish().sequences.tolist() == expected


def test_weights_that_were_replaced_are_let_go() -> None:
    model = _llama()
    spec = selfspec.wrap(model, runtime=GRAPHS)
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=NEW, do_sample=False)
    weight = weakref.ref(model.lm_head.weight)
    model.lm_head = nn.Linear(32, tiny.VOCABULARY, bias=False, dtype=torch.float64)
    model.lm_head.register_forward_hook(lambda *_: None)
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=NEW, do_sample=False)
    gc.collect()
    assert weight() is None


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_come_and_go() -> None:
    """Programs of a bare model, then adapters of peft in it: added, switched off and on, merged, and taken out."""
    peft = pytest.importorskip("peft")
    model = _llama()
    spec = wrapped(model, GRAPHS, selfspec.drafts.EarlyExit(1))
    texts: list[object] = []

    def check(is_other: bool) -> None:
        expected = [_text(spec) for _ in range(2)][-1]
        assert not texts or (texts[-1] != expected) == is_other
        texts.append(expected)

    check(is_other=True)
    assert spec.programs.proved
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    check(is_other=True)
    with adapted.disable_adapter():
        check(is_other=True)
        assert texts[-1] == texts[0]
    check(is_other=True)
    adapted.add_adapter("second", config)
    check(is_other=False)
    adapted.set_adapter("second")
    check(is_other=True)
    adapted.merge_adapter()
    check(is_other=False)
    adapted.unmerge_adapter()
    check(is_other=False)
    assert adapted.merge_and_unload() is model
    check(is_other=False)
    assert spec.programs.proved
