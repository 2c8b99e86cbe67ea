"""Find the declared adapter of a model's architecture."""

from __future__ import annotations

from transformers import PreTrainedModel

from selfspec.adapters import ADAPTERS, REFUSED
from selfspec.errors import UnsupportedModelError
from selfspec.model.adapter import Adapter


def find_adapter(model: PreTrainedModel) -> Adapter:
    """The declared adapter of a model's architecture.

    Raises:
        UnsupportedModelError: there is none, or the model is not a decoder-only causal LM.
    """
    check_causal(model)
    return adapter_for(model.config.model_type)


def check_causal(model: PreTrainedModel) -> None:
    """Refuse what is no decoder-only causal LM of `transformers`."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model; load it with AutoModelForCausalLM.from_pretrained"
        )
    if model.config.is_encoder_decoder or getattr(model.config, "add_cross_attention", False):
        raise UnsupportedModelError(f"{type(model).__name__} is not decoder-only; selfspec decodes causal LMs alone")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM.from_pretrained"
        )


def adapter_for(model_type: str) -> Adapter:
    """The declared adapter of an architecture.

    Raises:
        UnsupportedModelError: there is none.
    """
    if model_type in REFUSED:
        raise UnsupportedModelError(f"architecture {model_type!r} is not supported: {REFUSED[model_type]}")
    if model_type not in ADAPTERS:
        raise UnsupportedModelError(
            f"no adapter for architecture {model_type!r}; declare one: selfspec.wrap(model, "
            "adapter=selfspec.Adapter(...)), as docs/your_own_adapter.md shows"
        )
    return ADAPTERS[model_type]
