"""Refuse models, and additions of other libraries, that cannot be decoded in blocks over a shared cache."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.masks import unknown_layer_types
from selfspec.compat import cache_argument
from selfspec.errors import UnsupportedModelError
from selfspec.model.overrides import check_loop
from selfspec.model.view import view_with

_ATTENTION_KERNELS = ("eager", "sdpa")
# Adapters of PEFT whose output for a token depends on more than the model's own inputs up to that token.
_ADAPTERS = {
    "LILY": "its router takes the mean over all tokens of a pass",
    "POLY": "it takes the number of a task at every call",
    "XLORA": "it weighs its adapters by a pass over the whole text",
}


def check_decodable(model: PreTrainedModel, adapter: Adapter) -> None:
    """Refuse a model that cannot be decoded as it is: layers, methods, attention kernel, modules, training mode.

    Raises:
        UnsupportedModelError: naming the obstacle.
    """
    adapter.check(model)
    check_loop(model)
    cache_argument(model)
    # A replacement of a `forward` around the layers must also work around other layers.
    path = adapter.path(model)
    for length in range(len(path)):
        view_with(model.get_submodule(".".join(path[:length])), {})
    _check_modules(model)
    _check_one_device(model)
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
    if model.training and any(_differs_in_training(module) for module in model.modules()):
        raise UnsupportedModelError(
            "the model is in training mode, with dropout or gradient checkpointing; call model.eval() first"
        )


def _check_one_device(model: nn.Module) -> None:
    """Refuse a model whose layers are on several devices; offloaded layers do not count.

    Raises:
        UnsupportedModelError: naming the devices.
    """
    devices = sorted({str(weight.device) for weight in model.parameters() if not weight.is_meta})
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"the weights of {type(model).__name__} lie on {' and '.join(devices)}, and the shared cache is on one "
            "device; load it on one, in fewer bits or within a budget if it is too large, or split it over processes "
            'with tp_plan="auto" (docs/scaling.md)'
        )


def _check_modules(model: nn.Module) -> None:
    """Refuse a model whose output for a token differs between passes over one and over several tokens.

    Raises:
        UnsupportedModelError: naming the cause.
    """
    rounding = next(filter(_rounds_over_the_pass, model.modules()), None)
    if rounding is not None:
        name = next(name for name, module in model.named_modules() if module is rounding)
        raise UnsupportedModelError(
            f"{name} is a {type(rounding).__module__}.{type(rounding).__qualname__}, which rounds activations by the "
            "largest of all tokens in a pass, so that a draft changes the text; quantise the weights alone, or "
            "activations with a scale for each token"
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


def _rounds_over_the_pass(module: nn.Module) -> bool:
    if not type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
        return False
    # Weights in 16 bits take activations unchanged; weights in 8 bits take them in 8 bits.
    return getattr(getattr(module, "_packed_params", None), "dtype", None) is not torch.float16


def _differs_in_training(module: nn.Module) -> bool:
    rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
    drops = isinstance(rate, float) and rate > 0
    # Layers that checkpoint their activations get no cache.
    return drops or bool(getattr(module, "gradient_checkpointing", False))
