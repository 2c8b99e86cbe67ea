"""Make a model of some layers of another: its config and its weights, which it shares."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.arguments import shown
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.drafter import Drafter
from selfspec.draft.registry import draft_name
from selfspec.errors import DraftConfigError, UnsupportedModelError
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.tensor_parallel import whole

# Lists in a config that are as long as a model is deep by chance.
_NO_LAYERS = ("architectures", "eos_token_id", "bos_token_id", "pad_token_id")


def cut_model(model: PreTrainedModel, adapter: Adapter, layers: Sequence[int]) -> PreTrainedModel:
    """Make a model of some layers of another, in ascending order, with its embeddings, norm and head, to be saved.

    It shares their weights; computed tensors, such as rotary tables, take no memory. An UnsupportedModelError: the
    architecture cannot be cut between these layers.
    """
    try:
        config = cut_config(model.config, layers)
        with torch.device("meta"):
            cut: PreTrainedModel = type(model)(config)
        state = _cut_state(model, ".".join(adapter.path(model)), layers)
        cut.load_state_dict(state, strict=True, assign=True)
    # What a config or a model is checked for differs between architectures, and so do the types.
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be cut to layers {', '.join(map(str, layers))}: its config does not say "
            f"what each layer is ({reason}); choose another exit, or export from another model"
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


def _cut_state(model: nn.Module, prefix: str, layers: Sequence[int]) -> dict[str, Tensor]:
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
    return state


def parameter_count(model: nn.Module) -> int:
    """Return how many numbers the weights of a model are, tied ones once."""
    return sum(weight.numel() for weight in {id(each): each for each in model.parameters()}.values())


def layers_of(drafter: Drafter | None, model: PreTrainedModel, adapter: Adapter) -> tuple[int, ...]:
    """Return the layers that a draft is; refuse one that is not whole layers, or was made for another model."""
    if drafter is None:
        raise DraftConfigError("plain decoding has no draft to export; name one, e.g. exit:4 or skip:layers=3,5")
    if not isinstance(drafter, Drafter):
        raise DraftConfigError(f"a drafter is exported, such as EarlyExit(layer=4), got {shown(drafter)}")
    name = draft_name(drafter)
    if drafter.runs == "model" and not drafter.sources:
        raise DraftConfigError(f"{name} is a checkpoint of its own already; give its folder to the other engine")
    if drafter.sources and drafter.last.runs != "nothing":
        raise DraftConfigError(
            f"{name} drafts from text first, which no checkpoint can; export its last part, "
            f"{draft_name(drafter.last)}; other engines look up by themselves (docs/other_engines.md)"
        )
    if not isinstance(drafter, LayerPathDrafter):
        raise DraftConfigError(
            f"{name} drafts without a model, so there is no checkpoint to export; vLLM looks up by its method ngram, "
            "transformers by prompt_lookup_num_tokens (docs/other_engines.md)"
        )
    depth = len(adapter.decoder_layers(model))
    path = drafter.path(depth)
    drafter.check_model(model, adapter)
    if path.copy is not None:
        raise DraftConfigError(
            f"{name} runs layers in fewer bits, which a checkpoint of these weights does not hold; export the layers "
            "(exit:E, skip:layers=...) and let the engine quantize them"
        )
    if not drafter.runs_exact_layers(depth):
        raise DraftConfigError(
            f"{name} reads less of the cache, or fewer experts, than a checkpoint of these layers would; export the "
            "layers alone (exit:E, skip:layers=...)"
        )
    if drafter.head is not None and drafter.head.adapter is not None:
        raise DraftConfigError(f"the head of {name} is no layer of the model; export the layers alone (exit:E)")
    return _whole_layers(path, name)


def _whole_layers(path: LayerPath, name: str) -> tuple[int, ...]:
    runs = {layer: [path.runs(Sublayer(layer, part)) for part in Part] for layer in range(path.depth)}
    halves = [layer for layer, parts in runs.items() if any(parts) and not all(parts)]
    if halves:
        raise DraftConfigError(
            f"{name} leaves out a part of layers {', '.join(map(str, halves))}; other engines run whole layers: skip "
            "these whole (skip:layers=...), or leave early (exit:E)"
        )
    return tuple(layer for layer, parts in runs.items() if all(parts))
