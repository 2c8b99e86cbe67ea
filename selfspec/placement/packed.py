"""Pack the weights of a model in an exact format, and let its modules hold them: one weight is dense at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from selfspec.errors import StorageError, UnsupportedModelError, UnsupportedOptionError
from selfspec.formats.format import Format, formats
from selfspec.formats.gguf import Gguf
from selfspec.formats.packed import Packed, PackedWeight, UnsupportedWeightError, dense
from selfspec.formats.rounding import Kernels, kernels_of
from selfspec.kernels import native
from selfspec.kernels.large_pages import LargePages
from selfspec.model.checkpoint import find_device, local_folder, read_config
from selfspec.model.gguf import is_gguf
from selfspec.model.substitutes import kind_of
from selfspec.placement.quantised import why_not_read
from selfspec.placement.skeleton import DeferredTensor, Skeleton, names_by_weight, set_weight
from selfspec.placement.stored import PAGE, MappedFiles, StoredTensor, StoredWeight, WeightFiles, format_in, is_packed

_LOG = getLogger(__name__)


def exact_format(name: str) -> Format:
    """Return the format that keeps a model's weights; refuse a name that is none."""
    exact = {each: kind for each, kind in formats().items() if kind.exact and kind.packs}
    if name not in exact:
        known = " or ".join(map(repr, exact))
        raise UnsupportedOptionError(f"weights={name!r}: write {known} to pack them, or leave it out")
    return exact[name]()


def has_packed_weights(name: str, device: torch.device | str = "auto") -> bool:
    """Return whether a checkpoint's weights stay in their bytes: those of a folder of `selfspec pack` or a GGUF file.

    And, where the CPU computes, those that another library quantised so that kernels read them.
    """
    folder = local_folder(name)
    if folder is None or is_packed(folder) or is_gguf(folder):
        return folder is not None
    return find_device(device).type == "cpu" and why_not_read(folder, read_config(name)) is None


def format_of_weights(name: str, weights: str | None) -> Format | None:
    """Return the format that weights are asked for in, or else that the files have them in.

    None: none was asked for, and they are dense, or lie as another library quantised them.
    """
    folder = local_folder(name)
    if folder is not None and is_gguf(folder):
        if weights is not None:
            raise UnsupportedOptionError(
                f"weights={weights!r}: those of a GGUF file stay in its own bytes; leave weights out"
            )
        return Gguf()
    if weights is None and folder is not None and is_packed(folder):
        return format_in(folder)
    return None if weights is None else exact_format(weights)


def device_of(format: Format | None, device: torch.device | str | None) -> torch.device:
    """Return the device that computes with packed weights, "auto" by default; warn of one without kernels for them.

    UnsupportedOptionError: the format has layers for other devices alone.
    """
    found = find_device("auto" if device is None else device)
    if format is not None and not format.runs_on(found.type):
        if device is not None and str(device) != "auto":
            raise UnsupportedOptionError(f"weights in {format.name} are multiplied on the CPU alone; leave device out")
        found = find_device("cpu")
    if format is not None:
        warn_without_kernels(f"weights={format.name!r}", found)
    return found


def warn_without_kernels(weights: str, device: torch.device) -> None:
    """Warn of packed weights on a device that has no kernels for them."""
    if kernels_of(device) is Kernels.ATEN:
        why = native.absence() if device.type == "cpu" else f"on {device} there is no Triton"
        _LOG.warning("%s takes many times as long without selfspec's kernels: %s", weights, why)


@dataclass(frozen=True)
class HeldWeight:
    """Holds a weight on its way to modules or to a file, dense, packed or as it lies packed already, with its names.

    Attributes:
        transposed: whether modules hold what is packed as `[..., in, out]`.
    """

    names: Sequence[str]
    value: Tensor | Packed | StoredWeight
    dtype: torch.dtype
    transposed: bool = False


Given = Mapping[str, Callable[[], Tensor | StoredWeight]]
"""Weights of a model by first name, read when they are called."""


def pack_each(model: PreTrainedModel, format: Format | None, weights: Given) -> Iterator[HeldWeight]:
    """Yield the weights of a model, packed where they fit. UnsupportedModelError, at the end: none does.

    Without a format no further ones are packed.
    """
    packed, reason = 0, ""
    groups = [names for names in names_by_weight(model).values() if names[0] in weights]
    for names in logging.tqdm(groups, desc="Reading weights" if format is None else "Packing weights", delay=2):
        weight, transposed = weights[names[0]](), is_transposed(model, names)
        value: Tensor | Packed | StoredWeight = weight
        if isinstance(weight, Tensor) and transposed is not None and format is not None:
            laid_out = weight.mT if transposed else weight
            try:
                value = format.pack(laid_out) if format.takes(laid_out) else weight
            except UnsupportedWeightError as error:
                reason = f" ({names[0]} is {error})"
        packed += value is not weight or isinstance(weight, StoredWeight)
        yield HeldWeight(names, value, weight.dtype, bool(transposed))
    if not packed and format is not None and format.packs:
        raise UnsupportedModelError(
            f"no weight of {type(model).__name__} fits weights={format.name!r}, which keeps linear layers, experts and "
            f"embeddings of bfloat16 precision{reason}; load it without weights=, or round it: load it in bfloat16, or "
            "save it so before packing"
        )


def is_transposed(model: PreTrainedModel, names: Sequence[str]) -> bool | None:
    """Return whether all modules that hold a weight have it as `[..., in, out]`; None: some of them do not multiply."""
    found: set[bool | None] = set()
    for name in names:
        holder, _, leaf = name.rpartition(".")
        module = model.get_submodule(holder)
        if isinstance(module, nn.Linear | nn.Embedding):
            found.add(False if leaf == "weight" else None)
        else:
            kind = kind_of(module)
            found.add(kind.transposed if leaf in dict(kind.names) else None)
    return found.pop() if len(found) == 1 else None


def deferred_weights(made: Skeleton, format: Format | None) -> Given:
    """Return the weights of a checkpoint that takes no memory yet; what is packed already stays where it lies."""

    def given(weight: DeferredTensor) -> Tensor | StoredWeight:
        packed = weight.packed
        # Settings of what is read alone may differ from weight to weight.
        if packed is None or packed.format is None or (packed.format.packs and packed.format != format):
            return weight.values()
        return packed

    return {name: partial(given, weight) for name, weight in made.deferred.items()}


def fill(
    model: PreTrainedModel,
    format: Format | None,
    weights: Given,
    files: WeightFiles,
    device: torch.device | None = None,
) -> None:
    """Let a model hold weights, packed where they fit a format, on a device; None: each stays where it is."""
    pages = LargePages()
    for held in pack_each(model, format, weights):
        if isinstance(held.value, Tensor):
            set_weight(model, held.names, nn.Parameter(held.value.to(device), requires_grad=False))
        elif isinstance(held.value, StoredWeight):
            # Loading in another dtype changes no part.
            dtype = model.get_parameter(held.names[0]).dtype
            parts = {name: files.read(part).to(device) for name, part in held.value.parts.items()}
            if not isinstance(files, MappedFiles):
                parts = {name: pages.moved(part) for name, part in parts.items()}
            set_packed(model, held.names, held.value.parameter(parts, dtype))
        else:
            assert format is not None
            parts = {name: pages.moved(part.to(device)) for name, part in held.value.parts.items()}
            packed = Packed(held.value.shape, parts)
            set_packed(model, held.names, format.parameter(packed, held.dtype, held.transposed))
    if device is None:
        return
    # Buffers, and weights that the loader of `transformers` made; packed ones are there.
    for names in names_by_weight(model).values():
        weight = model.get_parameter(names[0])
        if not isinstance(weight, PackedWeight) and not weight.is_meta and weight.device != device:
            set_weight(model, names, nn.Parameter(weight.to(device), requires_grad=False))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


@torch.no_grad()
def packed_on_disk(made: Skeleton, format: Format | None, files: WeightFiles) -> dict[str, StoredWeight]:
    """Locate packed weights by their first names; what no packed folder holds is packed to a file, gone with `files`.

    Without a format only what lies packed is.

    Raises:
        UnsupportedModelError: none fits.
        StorageError: the folder of temporary files has no room.
    """
    found: dict[str, StoredWeight] = {}
    if format is None:
        return {name: packed for name, weight in made.deferred.items() if (packed := weight.packed) is not None}
    try:
        with NamedTemporaryFile(prefix="selfspec-", suffix=f".{format.name}") as file:
            for held in pack_each(made.model, format, deferred_weights(made, format)):
                if isinstance(held.value, StoredWeight):
                    found[held.names[0]] = held.value
                elif isinstance(held.value, Packed):
                    parts = {name: _written(file, part) for name, part in held.value.parts.items()}
                    found[held.names[0]] = StoredWeight(held.value.shape, held.dtype, parts, format, held.transposed)
            file.flush()
            files.opened(Path(file.name))
    except OSError as error:
        raise StorageError(
            f"packed weights cannot be written ({error.strerror}): set TMPDIR to a folder on a disk with room for them"
        ) from error
    return found


def _written(file: Any, values: Tensor) -> StoredTensor:
    """Write a tensor from the next page on."""
    file.seek(-(-file.tell() // PAGE) * PAGE)
    start = file.tell()
    file.write(values.contiguous().numpy().data)
    return StoredTensor(Path(file.name), start, tuple(values.shape), values.dtype)


def set_packed(model: PreTrainedModel, names: Sequence[str], weight: nn.Parameter) -> None:
    """Let modules hold a packed weight; their state dicts have its values, and take no others."""
    set_weight(model, names, weight)
    for each in names:
        module = model.get_submodule(each.rpartition(".")[0])
        module._register_state_dict_hook(_made_dense)
        module.register_load_state_dict_pre_hook(_refuse)


def _made_dense(module: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    for name in module._parameters:
        # A state with `keep_vars` has the parameters themselves.
        if prefix + name in state and not isinstance(state[prefix + name], nn.Parameter):
            state[prefix + name] = dense(state[prefix + name])


def _refuse(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    # Before anything is written: layers that are not packed would take their new weights.
    for name, weight in module._parameters.items():
        if isinstance(weight, PackedWeight) and prefix + name in state:
            raise UnsupportedModelError(
                f"packed weights keep their values: {prefix}{name}; load a checkpoint in its place"
            )
