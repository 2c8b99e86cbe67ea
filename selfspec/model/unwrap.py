"""The stock model inside what other libraries wrap around it, and what of theirs in it cannot be decoded in blocks."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from selfspec.errors import UnsupportedModelError

# Adapters of PEFT whose output for a token depends on more than the model's own inputs up to that token.
_ADAPTERS = {
    "LILY": "its router takes the mean over all tokens of a pass",
    "POLY": "it takes the number of a task at every call",
    "XLORA": "it weighs its adapters by a pass over the whole text",
}


def stock_model(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`'s wrapper or PEFT's; any other as it is.

    A pass selfspec compiles itself: see `Compiled`. PEFT puts adapters such as LoRA into the modules of the model, so
    they are part of what is inside.

    Raises:
        UnsupportedModelError: the wrapper adds a soft prompt, which is not in the model.
    """
    # What PEFT wraps is only there once PEFT has been imported.
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


def check_modules(model: nn.Module) -> None:
    """Refuse a model that gives a token something else in a pass over several than in a pass over one.

    Raises:
        UnsupportedModelError: naming what does.
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
    # Weights in 16 bits are multiplied unchanged; those in 8 bits with activations in 8 bits.
    return getattr(getattr(module, "_packed_params", None), "dtype", None) is not torch.float16


def check_saved_whole(model: PreTrainedModel) -> None:
    """Refuse to save a model whose weights PEFT has renamed: the folder would load as another model.

    Raises:
        UnsupportedModelError: there are adapters in it that PEFT put there.
    """
    if getattr(model, "peft_config", None) and not getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModelError(
            "adapters of PEFT are part of the model, which cannot be saved with them; merge them first: "
            "selfspec.wrap(peft_model.merge_and_unload(), ...)"
        )
