"""A model of some layers of another: its config and its weights, which it shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.errors import UnsupportedModelError
from selfspec.model.tensor_parallel import whole

# Lists in a config that are as long as a model is deep by chance.
_NO_LAYERS = ("architectures", "eos_token_id", "bos_token_id", "pad_token_id")


def cut_model(
    model: PreTrainedModel, adapter: Adapter, layers: Sequence[int], behind: Iterable[Mapping[str, Tensor]] = ()
) -> PreTrainedModel:
    """Make a model of some layers of another, in ascending order, with its embeddings, norm and head.

    It shares their weights, and is there to be saved: what a model computes when it is made, such as rotary tables,
    takes no memory. Behind the layers may come others, of weights by their names within a layer.

    Raises:
        UnsupportedModelError: this architecture cannot be cut between these layers.
    """
    further = list(behind)
    places = [*layers, *[layers[-1]] * len(further)]
    try:
        config = cut_config(model.config, places)
        with torch.device("meta"):
            cut: PreTrainedModel = type(model)(config)
        state = _cut_state(model, ".".join(adapter.path(model)), layers, further)
        cut.load_state_dict(state, strict=True, assign=True)
    # What a config or a model is checked for differs between architectures, and so do the types.
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be cut to layers {_listed(layers)}: its config does not say what each "
            f"layer is ({reason}); choose another exit, or export from another model"
        ) from error
    cut.tie_weights()
    cut.generation_config = deepcopy(model.generation_config)
    return cut.eval()


def cut_config(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """Return the config of a model of the layers with these numbers, each as long as its lists of layers say."""
    text = config.get_text_config(decoder=True)
    whole = config.to_dict()
    inner = whole if text is config else whole[_name_of(config, text)]
    depth, names = text.num_hidden_layers, getattr(text, "attribute_map", {})
    for name, value in inner.items():
        if isinstance(value, list | tuple) and len(value) == depth and name not in _NO_LAYERS:
            inner[name] = [value[layer] for layer in layers]
    inner[names.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    # Configs that were made for an encoder and a decoder count the layers of each.
    if "decoder_layers" in inner:
        inner["decoder_layers"] = len(layers)
    found: PreTrainedConfig = type(config).from_dict(whole)
    found._attn_implementation = config._attn_implementation
    return found


def _name_of(config: PreTrainedConfig, text: PreTrainedConfig) -> str:
    names: list[str] = [name for name in config.sub_configs if getattr(config, name) is text]
    return names[0]


def _cut_state(
    model: nn.Module, prefix: str, layers: Sequence[int], behind: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    numbers = {layer: place for place, layer in enumerate(layers)}
    state: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        kept = name
        if name.startswith(f"{prefix}."):
            layer, _, inside = name.removeprefix(f"{prefix}.").partition(".")
            if int(layer) not in numbers:
                continue
            kept = f"{prefix}.{numbers[int(layer)]}.{inside}"
        state[kept] = whole(weight).detach()
    for place, weights in enumerate(behind, start=len(layers)):
        state |= {f"{prefix}.{place}.{name}": weight for name, weight in weights.items()}
    return state


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def parameter_count(model: nn.Module) -> int:
    """Return how many numbers the weights of a model are, tied ones once."""
    return sum(weight.numel() for weight in {id(each): each for each in model.parameters()}.values())
