"""Load a checkpoint with its weights packed in an exact format, or write it so: one weight is dense at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from selfspec.errors import CheckpointError, StorageError, UnsupportedModelError, UnsupportedOptionError
from selfspec.files.writing import check_new, check_output_folder, whole_folder
from selfspec.formats.format import Format, formats
from selfspec.formats.packed import PackedLinear, PackedWeight, UnsupportedWeightError, dense
from selfspec.kernels.large_pages import LargePages
from selfspec.model.checkpoint import PACKED, find_device, local_folder, read_config, weight_files
from selfspec.model.identity import fingerprint
from selfspec.placement.packed_file import PackedFileWriter, format_in
from selfspec.placement.plan import shown_bytes
from selfspec.placement.skeleton import DeferredTensor, is_packed, names_by_weight, read_dtype, set_weight, skeleton
from selfspec.placement.weight_source import StoredWeight, WeightFiles, stored_weights
from selfspec.process import give_large_blocks_back


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


def has_packed_weights(name: str) -> bool:
    """Return whether a checkpoint is a folder of `write_packed`."""
    folder = local_folder(name)
    return folder is not None and is_packed(folder)


def format_of_weights(name: str, weights: str | None) -> Format | None:
    """Return the format that weights are asked for in, or else that the folder has them in; None: they are dense."""
    if weights is None and has_packed_weights(name):
        return format_in(Path(name).expanduser())
    return None if weights is None else exact_format(weights)


def load_packed(
    name: str, weights: str | None, dtype: torch.dtype | str | None, device: torch.device | str | None
) -> PreTrainedModel:
    """Load the checkpoint in a folder, whose linear layers and embeddings hold packed weights; the rest is as it is.

    Modules stay those of `transformers` and compute the same, to the last bit; their `state_dict` has dense weights. A
    folder of `write_packed` says its format, and is mapped.
    """
    folder, format = local_folder(name), format_of_weights(name, weights) or exact_format(weights)
    if folder is None:
        raise CheckpointError(f"{name!r} is no folder; download the checkpoint, and give its folder")
    device_of(format, device)
    made = skeleton(folder, read_config(name), read_dtype(dtype), WeightFiles())
    # Each weight's memory, as soon as it is packed.
    give_large_blocks_back()
    _pack(made.model, format, {name: partial(_given, weight, format) for name, weight in made.deferred.items()})
    return made.model


def device_of(format: Format, device: torch.device | str | None) -> torch.device:
    """Return the device that computes with packed weights; refuse one that has no kernels for them."""
    found = find_device("cpu" if device is None else device)
    if found.type != "cpu":
        raise UnsupportedOptionError(f"weights={format.name!r}: there are kernels for the CPU alone; leave device out")
    return found


def _given(weight: DeferredTensor, format: Format) -> Tensor | nn.Parameter:
    """Return the parameter over a mapped weight, or else the values."""
    where = weight.packed
    if where is not None and where.format == format:
        return parameter_over(format.layer(where.mapped, None, weight.dtype))
    return weight.values()


def packed_bytes(model: PreTrainedModel, format: Format) -> int:
    """Return the bytes of a model's weights, packed where they fit, without what depends on values."""
    sizes = 0
    for names in names_by_weight(model).values():
        weight = model.get_parameter(names[0])
        fits = format.takes(weight) and all(multiplies(model, name) for name in names)
        sizes += format.nbytes(weight.shape) if fits else weight.nbytes
    return sizes


# Weights of a checkpoint that are looked at, and their first bytes.
_LOOKED_AT, _FIRST = 8, 1 << 16


def has_bfloat16_precision(folder: Path, config: PreTrainedConfig) -> bool:
    """Return whether some weights of a checkpoint, by their first numbers, have no more bits than bfloat16."""
    try:
        weights = [each for each in stored_weights(weight_files(folder, config)).values() if len(each.shape) > 1]
    except CheckpointError:
        return False
    return bool(weights) and all(map(_looks_short, weights[:: max(1, len(weights) // _LOOKED_AT)]))


def _looks_short(weight: StoredWeight) -> bool:
    if weight.dtype != torch.float32:
        return weight.dtype == torch.bfloat16
    with weight.file.open("rb") as opened:
        opened.seek(weight.start)
        first = bytearray(opened.read(min(weight.nbytes, _FIRST)))
    return not (torch.frombuffer(first, dtype=torch.int32) & 0xFFFF).any()


def pack_weights(model: PreTrainedModel, format: Format) -> None:
    """Pack the weights of a model that is in memory, one by one, as `load_packed` does."""
    _pack(model, format, {name: weight.detach for name, weight in model.named_parameters()})


def _pack(model: PreTrainedModel, format: Format, weights: Mapping[str, Callable[[], Tensor | nn.Parameter]]) -> None:
    """Give a model its weights, packed where they fit; tied ones are under their first name."""
    pages, packed, reason = LargePages(), 0, ""
    groups = [names for names in names_by_weight(model).values() if names[0] in weights]
    for names in logging.tqdm(groups, desc="Packing weights", delay=2):
        weight, found = weights[names[0]](), None
        if isinstance(weight, nn.Parameter):
            found = weight
        elif format.takes(weight) and all(multiplies(model, each) for each in names):
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
    return parameter_over(layer)


def parameter_over(layer: PackedLinear) -> nn.Parameter:
    """Return the parameter that modules hold in place of a packed layer's dense weight."""
    return nn.Parameter(PackedWeight(layer), requires_grad=False)


def _made_dense(module: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    for name in module._parameters:
        # A state with `keep_vars` has the parameters themselves.
        if prefix + name in state and not isinstance(state[prefix + name], nn.Parameter):
            state[prefix + name] = dense(state[prefix + name])


def _refuse(_: nn.Module, state: dict[str, Any], prefix: str, *__: object) -> None:
    # Before anything is written: layers that are not packed would take their new weights.
    if f"{prefix}weight" in state:
        raise UnsupportedModelError(f"packed weights keep their values: {prefix}weight; load a checkpoint in its place")


# Files of a checkpoint that hold weights, or say where they are.
_WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class PackedFolder:
    """Says what `write_packed` wrote.

    Attributes:
        source: fingerprint of the model.
        packed: how many weights are packed.
        kept: how many are as they were.
        bytes: of the file with the weights.
        source_bytes: of the weights in the source's files.
        bits: of a number in a packed weight, all parts counted.
    """

    folder: str
    format: str
    source: str
    packed: int
    kept: int
    bytes: int
    source_bytes: int
    bits: float


def write_packed(name: str, to: Path, weights: str = "planes") -> PackedFolder:
    """Write the checkpoint in a folder to another one, with packed weights, which `load` maps.

    One weight at a time is in memory. The folder is written whole or not at all, and loaded once before it is kept.

    Raises:
        CheckpointError: files are missing or unreadable, or are packed already.
        UnsupportedModelError: no weight fits the format.
        StorageError: the folder is there already, or cannot be written.
    """
    format, folder = exact_format(weights), local_folder(name)
    if folder is None:
        raise CheckpointError(f"{name!r} is no folder; download the checkpoint, and give its folder")
    if is_packed(folder):
        raise CheckpointError(f"{folder} is packed already; load it, or give the checkpoint that it was packed from")
    check_new(to, "give another folder")
    check_output_folder(to)
    config, files = read_config(name), WeightFiles()
    made, stored = skeleton(folder, config, None, files), stored_weights(weight_files(folder, config))
    places = {
        weight.stored
        for names in names_by_weight(made.model).values()
        if (weight := made.deferred.get(names[0])) is not None and all(multiplies(made.model, each) for each in names)
    }
    _check_room(to, sum(weight.nbytes for weight in stored.values()))
    with whole_folder(to) as draft:
        for file in filter(Path.is_file, folder.iterdir()):
            if not file.name.endswith(_WEIGHT_FILES):
                shutil.copyfile(file, draft / file.name)
        with (draft / PACKED).open("wb") as opened:
            writer = PackedFileWriter(opened, format, len(stored))
            packed = _write(writer, format, stored, places, files)
            # What is written is loaded once; that refuses a model no weight of which is packed.
            writer.close("")
            opened.flush()
            source = fingerprint(load_packed(str(draft), None, None, None))
            writer.close(source)
    return PackedFolder(
        str(to),
        format.name,
        source,
        packed=len(packed),
        kept=len(stored) - len(packed),
        bytes=(to / PACKED).stat().st_size,
        source_bytes=sum(weight.nbytes for weight in stored.values()),
        bits=8 * sum(packed.values()) / sum(prod(stored[name].shape) for name in packed),
    )


def _write(
    writer: PackedFileWriter,
    format: Format,
    stored: Mapping[str, StoredWeight],
    places: Collection[object],
    files: WeightFiles,
) -> dict[str, int]:
    """Write all weights, those at `places` packed where they fit; return bytes of these by name."""
    found = {}
    for name, place in logging.tqdm(stored.items(), desc="Packing weights", delay=2):
        weight = place.read(files)
        try:
            packed = format.pack(weight) if place in places and format.takes(weight) else None
        except UnsupportedWeightError:
            packed = None
        if packed is None:
            writer.write(name, weight)
        else:
            writer.write_packed(name, packed, weight.dtype)
            found[name] = packed.nbytes
    return found


def _check_room(to: Path, most: int) -> None:
    """Refuse a disk without room for what is at most written."""
    place = to.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < most:
        raise StorageError(
            f"{to} may take {shown_bytes(most)}, and its disk has {shown_bytes(free)}; free some, or give a folder on "
            "another disk"
        )
