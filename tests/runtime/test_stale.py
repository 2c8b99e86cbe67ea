"""What a model is changed to after its passes were recorded: the text is the changed model's own, and back again."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import PreTrainedModel, pytorch_utils
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import selfspec
import tiny
from captures import Interpreted, StandIn
from proving import ticking
from selfspec.runtime import Compiled, Eager, Runtime, Traced
from selfspec.runtime.programs import Programs

PROMPT, NEW = 5, 16
Model = Any
Change = Callable[[Model], AbstractContextManager[Any]]


@contextmanager
def _set(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes set for a while."""
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

    def change(_: Model) -> AbstractContextManager[None]:
        return _set((owner, name, _otherwise(getattr(owner, name))))

    return change


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


@contextmanager
def _hooked(register: Callable[..., Any], *args: Any) -> Iterator[None]:
    handle = register(*args)
    try:
        yield
    finally:
        handle.remove()


def _all_hooked(_: Model) -> AbstractContextManager[None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output.flip(-1) if type(module).__name__.endswith("MLP") else None

    return _hooked(register_module_forward_hook, hook)


def _all_hooked_before(_: Model) -> AbstractContextManager[None]:
    def hook(module: nn.Module, inputs: Any) -> Any:
        return (inputs[0].flip(-1),) if isinstance(module, nn.Linear) else None

    return _hooked(register_module_forward_pre_hook, hook)


@contextmanager
def _data(weight: Tensor, data: Tensor) -> Iterator[None]:
    before, weight.data = weight.data, data
    try:
        yield
    finally:
        weight.data = before


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
    return _data(weight, weight.data.t())


def _strided(model: Model) -> AbstractContextManager[None]:
    table = model.model.rotary_emb.inv_freq
    return _data(table, table[:1].expand(len(table)))


@contextmanager
def _registered(model: Model) -> Iterator[None]:
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS.register("sdpa", _otherwise(sdpa))
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa)


@contextmanager
def _assigned(model: Model) -> Iterator[None]:
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _otherwise(ALL_ATTENTION_FUNCTIONS["sdpa"])
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


@contextmanager
def _default_dtype(_: Model) -> Iterator[None]:
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _other_layers(model: Model) -> AbstractContextManager[None]:
    layers = model.model.layers
    return _set((model.model, "layers", nn.ModuleList([layers[1], layers[0], layers[3], layers[2]])))


def _other_forward(model: Model) -> AbstractContextManager[None]:
    mlp = model.model.layers[2].mlp
    return _set((mlp, "forward", types.MethodType(_otherwise(type(mlp).forward), mlp)))


def _llama_class(name: str) -> Any:
    return getattr(modeling_llama, f"Llama{name}")


CHANGES: dict[str, Change] = {
    "scaling": _everywhere("Attention", scaling=2.0),
    "epsilon": _everywhere("RMSNorm", variance_epsilon=5.0),
    "activation": _everywhere("MLP", act_fn=nn.Tanh()),
    "rotary scaling": _everywhere("RotaryEmbedding", attention_scaling=3.0),
    "class: mlp": _patched(_llama_class("MLP"), "forward"),
    "class: norm": _patched(_llama_class("RMSNorm"), "forward"),
    "class: attention": _patched(_llama_class("Attention"), "forward"),
    "class: layer": _patched(_llama_class("DecoderLayer"), "forward"),
    "class: linear": _patched(nn.Linear, "forward"),
    "instance": _other_forward,
    "function: rotary": _patched(modeling_llama, "apply_rotary_pos_emb"),
    "function: below rotary": _patched(modeling_llama, "rotate_half"),
    "function: silu": _patched(functional, "silu"),
    "function: linear": _patched(functional, "linear"),
    "function: attention": _patched(functional, "scaled_dot_product_attention"),
    "kernel registered": _registered,
    "kernel assigned": _assigned,
    "hook": lambda model: _hooked(model.model.layers[1].mlp.register_forward_hook, _flipped),
    "hook of all": _all_hooked,
    "hook of all, before": _all_hooked_before,
    "strides of a weight": _transposed,
    "strides of a buffer": _strided,
    "weights in place": lambda model: _in_place(*model.parameters()),
    "buffers in place": lambda model: _in_place(*model.buffers()),
    "layers": _other_layers,
}
"""What happens to a tiny llama, each for a while."""

OTHERS: dict[str, tuple[Callable[[], Model], Change]] = {}
"""The same of other architectures."""


def _wrapped(model: PreTrainedModel, runtime: Runtime) -> selfspec.SelfSpeculative:
    spec = selfspec.wrap(model, selfspec.EarlyExit(1), draft_length=3, runtime=runtime)
    spec.programs = Programs(spec.runtime, ticking())
    return spec


def _check(model: Model, change: Change, runtime: Runtime, *, changes_text: bool = True) -> None:
    """The text is `model.generate`'s before a change, with it, and after it, though programs were made."""
    spec, prompt = _wrapped(model, runtime), tiny.prompt(PROMPT)

    def text() -> list[list[int]]:
        expected: list[list[int]] = model.generate(prompt, max_new_tokens=NEW, do_sample=False).tolist()
        for _ in range(2):
            assert spec.generate(prompt, max_new_tokens=NEW, do_sample=False).sequences.tolist() == expected
        return expected

    before = text()
    assert bool(spec.programs.proved) == (not isinstance(runtime, Eager))
    with change(model):
        assert not changes_text or text() != before
    assert text() == before
    assert bool(spec.programs.proved) == (not isinstance(runtime, Eager))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("runtime", [Eager(), Traced(after=0), StandIn(0, 8)], ids=["eager", "traced", "graphs"])
def test_a_change_of_the_model_is_seen(change: Change, runtime: Runtime) -> None:
    _check(tiny.llama(), change, runtime)
