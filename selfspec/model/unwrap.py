"""Find the stock model inside the wrappers of other libraries."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from selfspec.errors import UnsupportedModelError


def stock_model(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers of `torch.compile` and PEFT; any other model as it is.

    PEFT puts adapters such as LoRA into the modules of the model, so they are part of the inner model.

    Raises:
        UnsupportedModelError: the wrapper adds a soft prompt, which is not in the model.
    """
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


def check_saved_whole(model: PreTrainedModel) -> None:
    """Refuse to save a model whose weights PEFT has renamed: the folder would load as another model."""
    if getattr(model, "peft_config", None) and not getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModelError(
            "adapters of PEFT are part of the model, which cannot be saved with them; merge them first: "
            "selfspec.wrap(peft_model.merge_and_unload(), ...)"
        )
