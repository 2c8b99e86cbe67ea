"""Load a checkpoint whose weights stay packed in an exact format: each is read, packed and freed before the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from selfspec.errors import CheckpointError, UnsupportedModelError, UnsupportedOptionError
from selfspec.formats.format import Format, formats
from selfspec.formats.packed import PackedWeight, UnsupportedWeightError, dense
from selfspec.kernels.large_pages import LargePages
from selfspec.model.checkpoint import find_device, local_folder, read_config
from selfspec.placement.skeleton import names_by_weight, read_dtype, set_weight, skeleton
from selfspec.placement.weight_source import WeightFiles


def exact_format(name: str | None) -> Format:
    """Return the format that keeps a model's weights; refuse a name that is none."""
    exact = {each: kind for each, kind in formats().items() if kind.exact}
    if name not in exact:
        known = " or ".join(map(repr, exact))
        raise UnsupportedOptionError(
            f"weights={name!r}: write {known} to pack them, or give memory; selfspec.wrap takes a model as "
            "transformers loads it"
        )
    return exact[name]()


def load_packed(
    name: str, format: Format, dtype: torch.dtype | str | None, device: torch.device | str | None
) -> PreTrainedModel:
    """Load the checkpoint in a folder, whose linear layers and embeddings hold packed weights; the rest is as it is.

    Modules stay those of `transformers` and compute the same, to the last bit; their `state_dict` has dense weights.
    """
    folder = local_folder(name)
    if folder is None:
        raise CheckpointError(f"{name!r} is no folder; download the checkpoint, and give its folder")
    device_of(format, device)
    made = skeleton(folder, read_config(name), read_dtype(dtype), WeightFiles())
    _pack(made.model, format, {name: weight.values for name, weight in made.deferred.items()})
    return made.model


def device_of(format: Format, device: torch.device | str | None) -> torch.device:
    """Return the device that computes with packed weights; refuse one that has no kernels for them."""
    found = find_device("cpu" if device is None else device)
    if found.type != "cpu":
        raise UnsupportedOptionError(f"weights={format.name!r}: there are kernels for the CPU alone; leave device out")
    return found


def pack_weights(model: PreTrainedModel, format: Format) -> None:
    """Pack the weights of a model that is in memory, one by one, as `load_packed` does."""
    _pack(model, format, {name: weight.detach for name, weight in model.named_parameters()})


def _pack(model: PreTrainedModel, format: Format, weights: Mapping[str, Callable[[], Tensor]]) -> None:
    """Give a model its weights, packed where they fit; tied ones are under their first name."""
    pages, packed, reason = LargePages(), 0, ""
    groups = [names for names in names_by_weight(model).values() if names[0] in weights]
    for names in logging.tqdm(groups, desc="Packing weights", delay=2):
        weight, found = weights[names[0]](), None
        if format.takes(weight) and all(multiplies(model, each) for each in names):
            try:
                found = _packed(weight, format, pages)
            except UnsupportedWeightError as error:
                reason = f" ({names[0]} is {error})"
        packed += found is not None
        if found is None:
            set_weight(model, names, nn.Parameter(weight, requires_grad=False))
        else:
            set_packed(model, names, found)
    if not packed:
        raise UnsupportedModelError(no_packed_weight(model, format, reason))


def set_packed(model: PreTrainedModel, names: Sequence[str], weight: nn.Parameter) -> None:
    """Let modules hold a packed weight; their state dicts have its values, and take no others."""
    set_weight(model, names, weight)
    for each in names:
        module = model.get_submodule(each.rpartition(".")[0])
        module._register_state_dict_hook(_made_dense)
        module.register_load_state_dict_pre_hook(_refuse)


def no_packed_weight(model: PreTrainedModel, format: Format, reason: str) -> str:
    """Say that no weight of a model is packed, and the reason of one of them."""
    return (
        f"no weight of {type(model).__name__} fits weights={format.name!r}, which keeps linear layers and "
        f"embeddings of bfloat16 precision{reason}; leave weights out, or load with dtype='bfloat16', which "
        "rounds them"
    )


def multiplies(model: PreTrainedModel, name: str) -> bool:
    """Return whether a parameter, by name, is the weight of a linear layer or an embedding."""
    holder, _, leaf = name.rpartition(".")
    return leaf == "weight" and isinstance(model.get_submodule(holder), nn.Linear | nn.Embedding)


def _packed(weight: Tensor, format: Format, pages: LargePages) -> nn.Parameter:
    """Pack a weight; return the parameter that modules hold in its place."""
    layer = format.layer(format.pack(weight), None, weight.dtype)
    for part in layer.parameters():
        part.data = pages.moved(part.data)
    return nn.Parameter(PackedWeight(layer), requires_grad=False)


def _made_dense(module: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    for name in module._parameters:
        if prefix + name in state:
            state[prefix + name] = dense(state[prefix + name])


def _refuse(_: nn.Module, state: dict[str, Any], prefix: str, *__: object) -> None:
    # Before anything is written: layers that are not packed would take their new weights.
    if f"{prefix}weight" in state:
        raise UnsupportedModelError(f"packed weights keep their values: {prefix}weight; load a checkpoint in its place")
