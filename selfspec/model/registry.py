"""Find the declared adapter of a model's architecture, or of the language model inside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)

from selfspec.adapters import ADAPTERS, LAYOUTS, REFUSED
from selfspec.architecture import Adapter, MtpLayout, takes
from selfspec.errors import UnsupportedModelError


def find_adapter(model: PreTrainedModel) -> Adapter:
    """Return the adapter of a model's architecture, or of the language model inside it, at its place there."""
    check_causal(model)
    adapter = adapter_for(model.config)
    if _holds_layers(model, adapter.path(model)):
        return adapter
    decoder = model.get_decoder()
    place = next((name for name, module in model.named_modules() if module is decoder), "")
    own = adapter.path(decoder)
    # The inner language model may have a head or not.
    inside = ([*filter(None, place.split(".")), *own[left_out:]] for left_out in range(len(own)))
    path = next((path for path in inside if _holds_layers(model, path)), None)
    # A model without the declared layers is refused where adapters are checked.
    return adapter if path is None else replace(adapter, layers=".".join(path))


def auto_class(config: PreTrainedConfig) -> type[Any]:
    """Return the auto class of `transformers` for the causal LM, or multimodal model, of a configuration."""
    made: type[Any] = AutoModelForMultimodalLM
    if config.is_encoder_decoder and type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        made = AutoModelForSeq2SeqLM
    elif config.is_encoder_decoder and type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING:
        made = AutoModelForSpeechSeq2Seq
    elif type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        made = AutoModelForCausalLM
    return made


def without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    """Make the model of a configuration on the meta device, in the dtype of the checkpoint."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=config.dtype or torch.float32)
    return model


def check_causal(model: PreTrainedModel) -> None:
    """Refuse a model that is no causal LM or encoder-decoder of `transformers`."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model; load it with AutoModelForCausalLM.from_pretrained"
        )
    if has_encoder(model) != model.config.is_encoder_decoder or (
        getattr(model.config, "add_cross_attention", False) and not has_encoder(model)
    ):
        raise UnsupportedModelError(
            f"{type(model).__name__} attends to what it has no encoder for; wrap the encoder-decoder that it is part of"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM.from_pretrained"
        )


def has_encoder(model: PreTrainedModel) -> bool:
    """Return whether a model has an encoder that reads the input, beside the decoder that writes."""
    return takes(model, "encoder_outputs") and takes(model, "decoder_input_ids")


def check_type(model_type: str, brings_code: bool = False) -> None:
    """Refuse an architecture that is neither declared nor known to `transformers`, before its configuration is read.

    Code that a checkpoint brings is not run.
    """
    if model_type in REFUSED:
        raise UnsupportedModelError(f"architecture {model_type!r} is not supported: {REFUSED[model_type]}")
    if model_type in ADAPTERS or model_type in CONFIG_MAPPING:
        return
    if brings_code:
        raise UnsupportedModelError(
            f"architecture {model_type!r} is code that the checkpoint brings (auto_map in config.json), and nothing "
            "here runs it; read it and, if you trust it, load the model with transformers (trust_remote_code=True) and "
            "wrap that: selfspec.wrap(model, adapter=selfspec.Adapter(...)), as docs/your_own_adapter.md shows"
        )
    raise _unknown(model_type)


def adapter_for(config: PreTrainedConfig) -> Adapter:
    """Return the declared adapter of a configuration's architecture, or of its text part."""
    try:
        text = config.get_text_config(decoder=True).model_type
    # For some configurations, `transformers` cannot tell which part writes the text.
    except ValueError as error:
        raise UnsupportedModelError(f"{type(config).__name__} has several language models: {error}") from error
    for model_type in (config.model_type, text):
        if model_type in REFUSED:
            raise UnsupportedModelError(f"architecture {model_type!r} is not supported: {REFUSED[model_type]}")
    for model_type in (config.model_type, text):
        if model_type in ADAPTERS:
            return ADAPTERS[model_type]
    raise _unknown(config.model_type)


def mtp_layout(config: PreTrainedConfig) -> MtpLayout | None:
    """Return how checkpoints name modules for multi-token prediction; None: no layout is known."""
    return LAYOUTS.get(config.get_text_config(decoder=True).model_type)


def _unknown(model_type: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"no adapter for architecture {model_type!r}; declare one: selfspec.wrap(model, "
        "adapter=selfspec.Adapter(...)), as docs/your_own_adapter.md shows"
    )


def _holds_layers(model: nn.Module, path: list[str]) -> bool:
    try:
        return isinstance(model.get_submodule(".".join(path)), nn.ModuleList)
    except AttributeError:
        return False
