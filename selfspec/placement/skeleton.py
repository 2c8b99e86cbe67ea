"""A model without its weights, and where in the files each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from selfspec.model.checkpoint import check_complete, without_progress_bar
from selfspec.model.registry import auto_class
from selfspec.placement.weight_files import ReadBuffer, StoredWeight, WeightFiles


@dataclass(frozen=True)
class Skeleton:
    """A model whose weights take no memory yet.

    Attributes:
        model: in evaluation mode; its floating-point weights are on the meta device, but for those that a file keeps in
            another form, which are there.
        stored: where weights are that a file keeps as they are, by the parameter's name.
    """

    model: PreTrainedModel
    stored: dict[str, StoredWeight]


class _Unread:
    """A weight that `transformers` may place in a model, and which takes the memory of one number."""

    def __init__(self, weight: StoredWeight, dtype: torch.dtype) -> None:
        self._shape, self.number = weight.shape, torch.zeros(1, dtype=dtype)

    def __getitem__(self, _: object) -> Tensor:
        return self.number.expand(self._shape)

    def get_shape(self) -> list[int]:
        return list(self._shape)


class _Read:
    """A weight that is read when `transformers` asks for it."""

    def __init__(self, weight: StoredWeight, files: WeightFiles) -> None:
        self._weight, self._files = weight, files

    def __getitem__(self, index: object) -> Tensor:
        read = ReadBuffer(self._weight.nbytes).read(self._files, self._weight)
        return read[index].clone()  # type: ignore[index]

    def get_shape(self) -> list[int]:
        return list(self._weight.shape)


def skeleton(
    folder: Path, config: PreTrainedConfig, weights: dict[str, StoredWeight], dtype: torch.dtype, files: WeightFiles
) -> Skeleton:
    """Make the model that a checkpoint describes, without reading the weights that a file keeps as they are.

    Args:
        folder: of the checkpoint.
        config: of the checkpoint.
        weights: of the checkpoint, by the file's names.
        dtype: of the model.
        files: to read from.

    Raises:
        CheckpointError: weights are missing or of another shape.
    """
    unread: dict[str, _Unread | _Read] = {name: _Unread(weight, dtype) for name, weight in weights.items()}
    numbers = {each.number.data_ptr(): name for name, each in unread.items() if isinstance(each, _Unread)}
    model = _placed(folder, config, unread, dtype)
    keys = _keys(model, numbers)
    converted = set(weights) - set(keys.values())
    if converted:
        # `transformers` joins or splits these, say the experts of a mixture: it gets the real ones.
        del model
        model = _placed(folder, config, unread | {name: _Read(weights[name], files) for name in converted}, dtype)
        keys = _keys(model, numbers)
    for names in names_by_weight(model).values():
        if names[0] in keys:
            empty = torch.empty_like(model.get_parameter(names[0]), device="meta")
            set_weight(model, names, nn.Parameter(empty, requires_grad=False))
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return Skeleton(model.eval(), {name: weights[key] for name, key in keys.items()})


def names_by_weight(model: PreTrainedModel) -> dict[int, list[str]]:
    """Name every parameter; tied ones have several names."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return names


def set_weight(model: PreTrainedModel, names: Sequence[str], weight: nn.Parameter) -> None:
    """Put a parameter in the place of the one that has these names."""
    for name in names:
        holder, _, leaf = name.rpartition(".")
        model.get_submodule(holder)._parameters[leaf] = weight


def _keys(model: PreTrainedModel, numbers: dict[int, str]) -> dict[str, str]:
    """What the files call the parameters that are kept there as they are, by the model's names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: numbers[weight.data_ptr()] for name, weight in named if weight.data_ptr() in numbers}


def _placed(
    folder: Path, config: PreTrainedConfig, weights: dict[str, _Unread | _Read], dtype: torch.dtype
) -> PreTrainedModel:
    with torch.device("meta"):
        made = auto_class(config).from_config(config)
    # Of a config of several parts it may be the language model alone, which takes its own part.
    kind, config = type(made), made.config
    with without_progress_bar():
        model, report = kind.from_pretrained(
            None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    check_complete(str(folder), model, report)
    placed: PreTrainedModel = model
    return placed
