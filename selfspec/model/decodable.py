"""Refuse models, and additions of other libraries, that cannot be decoded in blocks; find the model inside wrappers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import PreTrainedModel

from selfspec.architecture import Adapter, modules_in
from selfspec.cache.masks import unknown_layer_types
from selfspec.compat import cache_argument
from selfspec.errors import UnsupportedModelError
from selfspec.formats.packed import PackedWeight
from selfspec.model.registry import has_encoder
from selfspec.model.view import has_other_forward, is_streamed, view_with

_ATTENTION_KERNELS = ("eager", "sdpa")
# Adapters of PEFT whose output for a token depends on more than the model's own inputs up to that token.
_ADAPTERS = {
    "LILY": "its router takes the mean over all tokens of a pass",
    "POLY": "it takes the number of a task at every call",
    "XLORA": "it weighs its adapters by a pass over the whole text",
}


def check_decodable(model: PreTrainedModel, adapter: Adapter) -> None:
    """Refuse a model that cannot be decoded as it is: layers, methods, attention kernel, modules, training mode."""
    adapter.check(model)
    check_loop(model)
    cache_argument(model)
    # A replacement of a `forward` around the layers must also work around other layers.
    path = adapter.path(model)
    for length in range(len(path)):
        view_with(model.get_submodule(".".join(path[:length])), {})
    modules = modules_in(model)
    _check_modules(model, modules)
    _check_one_device(model, modules)
    config = model.config.get_text_config(decoder=True)
    kernel = config._attn_implementation
    if kernel not in _ATTENTION_KERNELS:
        raise UnsupportedModelError(
            f"attention kernel {kernel!r} is not supported; load the model with attn_implementation='sdpa'"
        )
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModelError(
            f"{type(model).__name__} reads a prompt in both directions (use_bidirectional_attention), so that keys and "
            "values of a token depend on those after it; use model.generate"
        )
    unknown = unknown_layer_types(config)
    if unknown:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of type {unknown[0]!r}, whose tokens see others than the masks of the "
            "shared cache say; use model.generate"
        )
    if model.training and any(map(_differs_in_training, modules)):
        raise UnsupportedModelError(
            "the model is in training mode, with dropout or gradient checkpointing; call model.eval() first"
        )


def _check_one_device(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Refuse a model whose layers are on several devices; offloaded layers do not count."""
    weights = (weight for module in modules for weight in module._parameters.values())
    devices = sorted(map(str, {weight.device for weight in weights if weight is not None} - {torch.device("meta")}))
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"the weights of {type(model).__name__} lie on {' and '.join(devices)}, and the shared cache is on one "
            "device; load it on one, in fewer bits or within a budget if it is too large, or split it over processes "
            'with tp_plan="auto" (docs/scaling.md)'
        )


def _check_modules(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Refuse a model whose output for a token differs between passes over one and over several tokens."""
    others: dict[tuple[Any, ...], nn.Module] = {}
    for module in filter(_multiplies_otherwise, modules):
        sizes = module.in_features, getattr(module, "out_features", None)
        others.setdefault((type(module), type(getattr(module, "weight", None)), *sizes), module)
    mixing = next((module for module in others.values() if _mixes_tokens(model, module)), None)
    if mixing is not None:
        name = next(name for name, module in model.named_modules() if module is mixing)
        kind, over = type(mixing), type(getattr(mixing, "weight", None)).__name__
        raise UnsupportedModelError(
            f"{name} is a {kind.__module__}.{kind.__qualname__} over a {over}, whose output for a token changes with "
            "the others of a pass, as where activations are rounded by the largest of all, so that a draft changes the "
            "text; quantise the weights alone, or activations with a scale for each token"
        )
    for config in getattr(model, "peft_config", {}).values():
        reason = _ADAPTERS.get(config.peft_type.value)
        if getattr(config, "alora_invocation_tokens", None):
            reason = "an activated LoRA begins at a place in the prompt that only PEFT's own generation tells it"
        if reason is not None:
            raise UnsupportedModelError(
                f"the adapter {config.peft_type.value} of PEFT cannot be decoded in blocks: {reason}; use "
                "peft_model.generate without selfspec"
            )


def _multiplies_otherwise(module: nn.Module) -> bool:
    """Return whether a module is a linear layer in memory, and neither torch's own nor over weights of this package."""
    if type(getattr(module, "in_features", None)) is not int or is_streamed(module):
        return False
    held = [*module.parameters(), *module.buffers()]
    usual = type(module) is nn.Linear and type(module.weight) is nn.Parameter and not has_other_forward(module)
    return not usual and not any(each.is_meta or isinstance(each, PackedWeight | DTensor) for each in held)


# The size of a token beside another, whose values are about 1, and the least change of its output that is no rounding:
# LLM.int8() rounds inputs less where another token is large, which changes outputs by about .007.
_LARGE, _CHANGED = 4096.0, 0.002


@torch.no_grad()
def _mixes_tokens(model: Any, linear: Any) -> bool:
    """Return whether the output of a linear layer for a token depends on the other token of a pass."""
    drawn = torch.randn(2, linear.in_features, generator=torch.Generator().manual_seed(0))
    token, other = drawn.to(next(model.parameters()).device, model.dtype)
    try:
        alike, beside = (linear.forward(torch.stack([token, each])[None])[0, 0] for each in (token, _LARGE * other))
    # Libraries prepare some layers before the first pass of the whole model.
    except Exception:
        return False
    return bool((alike - beside).abs().max() > _CHANGED * alike.abs().max())


def _differs_in_training(module: nn.Module) -> bool:
    rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
    drops = isinstance(rate, float) and rate > 0
    # Layers that checkpoint their activations get no cache.
    return drops or bool(getattr(module, "gradient_checkpointing", False))


def stock_model(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers of `torch.compile` and PEFT, whose adapters are part of it; others unchanged."""
    # Models wrapped by PEFT exist only once PEFT has been imported.
    peft = sys.modules.get("peft")
    while not isinstance(model, PreTrainedModel):
        if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        elif peft is not None and isinstance(model, peft.PeftModel | peft.PeftMixedModel):
            model = _inside_peft(model)
        else:
            break
    return model


def _inside_peft(model: Any) -> nn.Module:
    tuner: nn.Module = model.base_model
    if isinstance(tuner, PreTrainedModel):
        kind = model.active_peft_config.peft_type.value
        raise UnsupportedModelError(
            f"the soft prompt of {type(model).__name__} ({kind}) is no part of the model inside it; wrap that, and let "
            "PEFT hand over the prompt: spec = selfspec.wrap(peft_model.base_model), then "
            "peft_model.generate(custom_generate=spec)"
        )
    return tuner.get_submodule("model")


@torch.no_grad()
def run_preparation(model: PreTrainedModel) -> None:
    """Run a model once whose linear layers a library makes in a hook of its first pass: views run no hook of a model.

    compressed-tensors does so with what it keeps in fewer bits.
    """
    if model._forward_pre_hooks and any(map(_waits, model.modules())):
        model(**{name: given.to(model.device) for name, given in model.dummy_inputs.items()})


def _waits(module: nn.Module) -> bool:
    """Return whether a layer has no weight that torch multiplies by: it is packed, or its scale is beside it."""
    if type(module) is not nn.Linear:
        return False
    weight = getattr(module, "weight", None)
    return weight is None or weight.dtype.itemsize == 1


def check_saved_whole(model: PreTrainedModel) -> None:
    """Refuse to save a model whose weights PEFT has renamed: the folder would load as another model."""
    if getattr(model, "peft_config", None) and not getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModelError(
            "adapters of PEFT are part of the model, which cannot be saved with them; merge them first: "
            "selfspec.wrap(peft_model.merge_and_unload(), ...)"
        )


GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = (_global_forward_hooks, _global_forward_pre_hooks)
"""Hooks of all modules of the process, by number."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Methods that `model.generate` calls after reading its arguments, for each token or for the cache.
_LOOP = (
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_prepare_cache_for_generation",
    "_prefill",
    "_sample",
    "_has_unfinished_sequences",
)
_KNOWN = ("transformers.", "torch.")


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, before or after its `forward`."""
    return any(module.__dict__[hooks] for hooks in _HOOKS)


def base_alone(model: nn.Module, base: str) -> bool:
    """Return whether a pass without logits may run `base` alone: around it is only code of `transformers` and torch."""
    path = base.split(".")
    around = [model.get_submodule(".".join(path[:length])) for length in range(len(path))]
    return (
        bool(base)
        and not any(GLOBAL_HOOKS)
        and not any(
            has_hooks(module)
            or has_other_forward(module)
            or type(module).__call__ is not nn.Module.__call__
            or not _is_published(type(module).forward)
            for module in around
        )
    )


def check_loop(model: PreTrainedModel) -> None:
    """Refuse a model that overrides methods of the loop of `model.generate`, which does not run here.

    Soft prompts are fine: the instance's `prepare_inputs_for_generation` is called for the first inputs.
    """
    # On the instance, these two call the method they replaced, or come from a folder with a recipe.
    kind, shadows = type(model), vars(model).keys() - {"generate", "prepare_inputs_for_generation"}
    # A model with an encoder may have its own `generate`, which decodes in pieces.
    for name in _LOOP if has_encoder(model) else ("generate", *_LOOP):
        found = getattr(model if name in shadows else kind, name)
        if not _is_published(getattr(found, "__func__", found)):
            raise UnsupportedModelError(
                f"{type(model).__name__} has a {name} of its own, which would not be called here, so that its text "
                "could be another; use model.generate, do the same in forward or in a hook, or take the method away if "
                "it changes nothing"
            )


def _is_published(function: Callable[..., Any]) -> bool:
    """Return whether a function, and every function it wraps, is from `transformers` or torch."""
    each: Any = function
    while each is not None:
        # A wrapper takes over the wrapped function's `__module__`; its globals show its real module.
        if not str(getattr(each, "__globals__", {}).get("__name__")).startswith(_KNOWN):
            return False
        each = getattr(each, "__wrapped__", None)
    return True
