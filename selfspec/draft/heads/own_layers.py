"""The layers of a head as a causal LM of `transformers` that is called with embeddings."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from selfspec.errors import HeadError


def layer_config(given: Mapping[str, Any], source: str) -> PreTrainedConfig:
    """Return the configuration of a head's layers.

    Raises:
        HeadError: its type is not known, or does not take a value in it.
    """
    kind = given.get("model_type")
    fits = len(given.get("layer_types") or ()) == given.get("num_hidden_layers")
    kept = {name: value for name, value in given.items() if name != "layer_types" or fits}
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise HeadError(
            f"the config.json of {source} names layers of the type {kind!r}, which is not known; copy it from the "
            "original again"
        )
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(
            # Other embeddings and another head are used, so these take no room.
            {**kept, "vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        )
    # The validation of fields raises various types.
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise HeadError(f"the config.json of {source} cannot be used ({said})") from error
    config.tie_word_embeddings = False
    return config


def one_layer_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of one layer like a target's own, with embeddings and a head that take no room."""
    config: Any = copy.deepcopy(model.config.get_text_config(decoder=True))
    config.num_hidden_layers = 1
    config.vocab_size = 1
    config.tie_word_embeddings = False
    config.bos_token_id = config.eos_token_id = None
    # Some configuration types do not take None.
    config.pad_token_id = 0
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    found: PreTrainedConfig = config
    return found


def causal_lm(config: PreTrainedConfig, attention: str | None) -> PreTrainedModel:
    """Make a causal LM on the meta device with real rotary tables; `attention` None is the default kernel."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    _make_tables(model, config)
    return model.eval()


def _make_tables(model: nn.Module, config: PreTrainedConfig) -> None:
    """Replace modules that hold only tables, which no file has, by modules with values."""
    for module in model.modules():
        for name, child in module.named_children():
            if not list(child.parameters()) and any(buffer.is_meta for buffer in child.buffers()):
                kind: Any = type(child)
                setattr(module, name, kind(config=config))


def text_alone(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a class like that of a multimodal model, with its language model and its head alone."""

    def make(self: Any, config: PreTrainedConfig) -> None:
        kind.__init__(self, config)
        decoder, head = self.get_decoder(), self.get_output_embeddings()
        holder = self
        for name in next(name for name, module in self.named_modules() if module is decoder).split("."):
            for other, module in list(holder.named_children()):
                if other != name and module is not head:
                    delattr(holder, other)
            holder = getattr(holder, name)

    # With another module or name, `transformers` would not rename the weights in the files.
    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__})
