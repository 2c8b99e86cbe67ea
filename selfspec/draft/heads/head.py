"""A draft head bound to a target: its inputs, its own layers, and the state that stands for a drafted token."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.errors import DraftConfigError, HeadError
from selfspec.formats.format import Format
from selfspec.model.early_head import spread
from selfspec.model.identity import weight_of
from selfspec.model.registry import find_adapter
from selfspec.model.substitutes import Substitutes
from selfspec.model.tensor_parallel import check_on_one_process


class Fusion(nn.Module):
    """Computes the inputs of a head's layers from states of the target and the tokens after them."""

    def state(self, features: Sequence[Tensor]) -> Tensor:
        """Join the features of all points to one state, `[rows, tokens, hidden]`; by default there is one feature."""
        (state,) = features
        return state

    @abstractmethod
    def inputs(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Return the layers' inputs, given embeddings and the states before them, `[rows, tokens, hidden]` each."""


@dataclass(frozen=True, eq=False)
class Head:
    """Holds the parts of a head over one target."""

    fusion: Fusion
    layers: PreTrainedModel  # causal LM of its layers, final norm and head, which is called with embeddings
    adapter: Adapter
    recycled: Literal["last", "normed"]  # its own state that stands for a drafted token
    embed: nn.Module
    tokens: Tensor | None  # ids that it can draft, in the order of its logits; None: all
    format: Format | None = None  # of its linear layers; None: they have the dtype of the target

    def packed(self, format: Format, substitutes: Substitutes) -> Head:
        """Return a copy with linear layers packed in a format; `substitutes` share one copy of the target's head."""
        fusion, layers = (
            substitutes.within(module, name, format)
            for name, module in (("fusion", self.fusion), ("layers", self.layers))
        )
        assert isinstance(fusion, Fusion)
        assert isinstance(layers, PreTrainedModel)
        return replace(self, fusion=fusion, layers=layers, format=format)

    def spread(self, logits: Tensor, vocabulary: int) -> Tensor:
        """Spread logits of the ids it can draft over the target's, `[rows, tokens, vocabulary]`; others get -inf."""
        return spread(logits, self.tokens, vocabulary)


def check_for_head(model: PreTrainedModel, what: str, format: Format | None) -> None:
    """Refuse a model that no head, `what`, can draft for: it is on several processes, or its device lacks kernels."""
    check_on_one_process(model, what)
    if format is not None and not format.runs_on(model.device.type):
        raise DraftConfigError(
            f"there are no kernels for {what} in {format.bits} bits on {model.device.type}; leave {format.name}+ out, "
            "or use cpu or cuda"
        )


def weight_bytes(shapes: Mapping[str, Sequence[int]], model: PreTrainedModel, format: Format | None) -> int:
    """Count bytes of weights by name; a format packs linear layers, the rest has the dtype of the model."""
    return sum(_bytes_of(name, shape, model.dtype.itemsize, format) for name, shape in shapes.items())


def step_bytes(shapes: Mapping[str, Sequence[int]], model: PreTrainedModel, format: Format | None) -> int:
    """Count bytes that a step reads: the weights, as in `weight_bytes`, and the model's head if they have no head."""
    output = weight_of(model.get_output_embeddings()).shape
    return weight_bytes({"lm_head.weight": output, **shapes}, model, format)


def _bytes_of(name: str, shape: Sequence[int], itemsize: int, format: Format | None) -> int:
    is_linear = len(shape) == 2 and not name.endswith("embed_tokens.weight")
    if format is None or not is_linear or not format.fits(shape):
        return torch.Size(shape).numel() * itemsize
    return format.nbytes(shape)


def layer_config(given: Mapping[str, Any], source: str) -> PreTrainedConfig:
    """Return the configuration of a head's layers; refuse an unknown type, or a value that it does not take."""
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
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:1]
    config.vocab_size = 1
    config.tie_word_embeddings = False
    config.bos_token_id = config.eos_token_id = None
    # Some configuration types do not take None.
    config.pad_token_id = 0
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return cast(PreTrainedConfig, config)


def causal_lm(config: PreTrainedConfig, attention: str | None) -> PreTrainedModel:
    """Make a causal LM that is called with embeddings, on the meta device; `attention` None is the default kernel."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    # Modules that hold only tables, which no file has, are replaced by modules with values.
    for module in model.modules():
        for name, child in module.named_children():
            if not list(child.parameters()) and any(buffer.is_meta for buffer in child.buffers()):
                kind: Any = type(child)
                setattr(module, name, kind(config=config))
    inside_of(model).embed_tokens = nn.Identity()
    return model.eval()


def inside_of(layers: PreTrainedModel) -> Any:
    """Return the part of a causal LM that holds its layers and its final norm."""
    return layers.get_submodule(find_adapter(layers).base(layers))


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
