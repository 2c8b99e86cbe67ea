"""Make a model without its weights, and record how each weight is made from the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from selfspec.errors import CheckpointError, SelfSpecError
from selfspec.model.checkpoint import dtype_of_index, load_model, weight_files
from selfspec.placement.deferred import DeferredTensor
from selfspec.placement.weight_files import ReadBuffer, StoredWeight, WeightFiles, stored_weights

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that weights may be computed in, and streamed from files in."""


@dataclass(frozen=True)
class Skeleton:
    """A model whose weights take no memory yet.

    Attributes:
        model: in evaluation mode; its weights are on the meta device, except those that depend on values in the files.
        deferred: deferred weights by the parameter's name; tied ones under the first name alone.
        stored: places of weights that files hold as they are, except for a cast to the model's dtype, by every name.
    """

    model: PreTrainedModel
    deferred: dict[str, DeferredTensor]
    stored: dict[str, StoredWeight]

    @property
    def nbytes_beside(self) -> int:
        """The most bytes that making a weight takes, without the weight itself."""
        return max((weight.nbytes_beside for weight in self.deferred.values()), default=0)


def skeleton(folder: Path, config: PreTrainedConfig, dtype: torch.dtype | None, files: WeightFiles) -> Skeleton:
    """Make the model of a checkpoint with the loader of `transformers`, without reading its weights.

    If `dtype` is None, it is the checkpoint's own.

    Raises:
        CheckpointError: weights are missing, or of another shape, or the loader refuses.
    """
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} has an adapter (adapter_config.json), which a memory budget would leave out; merge it into the "
            "weights (merge_and_unload of peft, save_pretrained), or load the checkpoint without a budget"
        )
    model = _loaded(folder, config, dtype, stored_weights(weight_files(folder, config)), files)
    model.config.name_or_path = str(folder)
    # As the loader does for a folder.
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    else:
        model.generation_config = GenerationConfig.from_pretrained(folder, "config.json", _from_model_config=True)
    deferred: dict[str, DeferredTensor] = {}
    stored: dict[str, StoredWeight] = {}
    for names in names_by_weight(model).values():
        weight = model.get_parameter(names[0])
        if isinstance(weight, DeferredTensor):
            deferred[names[0]] = weight
            where = weight.stored
            if where is not None and where.dtype in DTYPES and weight.dtype == model.config.dtype:
                stored |= dict.fromkeys(names, where)
            empty = torch.empty_like(weight, device="meta")
            set_weight(model, names, nn.Parameter(empty, requires_grad=False))
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if isinstance(buffer, DeferredTensor):
                module._buffers[key] = buffer.values()
    return Skeleton(model.eval(), deferred, stored)


def names_by_weight(model: PreTrainedModel) -> dict[int, list[str]]:
    """Return all names of each parameter, by its id; tied parameters have several names."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return names


def set_weight(model: PreTrainedModel, names: Sequence[str], weight: nn.Parameter) -> None:
    """Replace the parameter that has these names."""
    for name in names:
        holder, _, leaf = name.rpartition(".")
        model.get_submodule(holder)._parameters[leaf] = weight


def _loaded(
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype | None,
    weights: Mapping[str, StoredWeight],
    files: WeightFiles,
) -> PreTrainedModel:
    """Return the model with deferred weights, except those that its class changes in place after loading."""
    changed: set[str] = set()
    while True:
        known = len(changed)
        tensors = {
            key: ReadBuffer(weight.nbytes).read(files, weight)
            if key in changed
            else DeferredTensor.of(weight, files, partial(changed.add, key))
            for key, weight in weights.items()
        }
        try:
            return load_model(str(folder), config, dtype or dtype_of_index(folder, config) or "auto", tensors)
        except SelfSpecError:
            if len(changed) == known:
                raise
