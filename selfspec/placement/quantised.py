"""Locate the weights of checkpoints that other libraries quantised, which stay in the bytes in which they lie."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from selfspec.errors import CheckpointError
from selfspec.formats.groups import Groups, unpacked
from selfspec.formats.words import WordsOfAwq, WordsOfGptq
from selfspec.model.checkpoint import weight_files
from selfspec.placement.stored import StoredTensor, StoredWeight, WeightFiles, stored_tensors

Tensors = Mapping[str, StoredTensor]


class UnknownQuantisationError(Exception):
    """Says why no kernel reads the weights of a quantised checkpoint: such models run as their library loads them."""


def quantisation_of(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """Return what a configuration says of how weights are quantised; None: they are not."""
    for place in (config, config.get_text_config(decoder=True)):
        found = getattr(place, "quantization_config", None)
        if found is not None:
            return found if isinstance(found, Mapping) else found.to_dict()
    return None


def is_made_dense(about: Mapping[str, Any]) -> bool:
    """Return whether the loader makes weights of this method dense by itself, on a CPU."""
    return about.get("quant_method") in ("fp8", "mxfp4")


def without_quantisation(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a configuration that says nothing of it: modules are those of the dense model."""
    found = copy.deepcopy(config)
    for place in (found, found.get_text_config(decoder=True)):
        if getattr(place, "quantization_config", None) is not None:
            del place.quantization_config
    return found


def quantised_weights(about: Mapping[str, Any], stored: Tensors, files: WeightFiles) -> dict[str, StoredWeight]:
    """Locate the weights of a checkpoint, by the names of the dense ones.

    Raises:
        UnknownQuantisationError: no kernel reads them.
        CheckpointError: a part is missing, or has the wrong shape.
    """
    method = str(about.get("quant_method"))
    if method not in _METHODS:
        raise UnknownQuantisationError(f"weights in {method!r}")
    rest = dict(stored)
    found = dict(_METHODS[method](about, rest, files))
    if not found:
        raise UnknownQuantisationError(f"no weight in {method}")
    return found | {name: StoredWeight.dense(each) for name, each in rest.items()}


def _compressed(
    about: Mapping[str, Any], rest: dict[str, StoredTensor], files: WeightFiles
) -> Iterator[tuple[str, StoredWeight]]:
    """Take the weights of compressed-tensors out of the rest, by name: integers in words, of 4 or 8 bits."""
    groups = about.get("config_groups") or {}
    schemes = [each for each in groups.values() if isinstance(each, Mapping)]
    kept = {str(each.get("format") or about.get("format")) for each in schemes}
    if kept - {_PACKED_WORDS}:
        raise UnknownQuantisationError(f"compressed-tensors in {' and '.join(sorted(kept))}")
    if any(each.get("input_activations") for each in schemes):
        raise UnknownQuantisationError("compressed-tensors with rounded activations")
    for more in ("kv_cache_scheme", "transform_config"):
        if about.get(more):
            raise UnknownQuantisationError(f"compressed-tensors with {more}")
    for name in [each.removesuffix("_packed") for each in rest if each.endswith(".weight_packed")]:
        parts = {part: rest.pop(f"{name}_{part}", None) for part in ("packed", "scale", "shape", "zero_point", "g_idx")}
        codes, scales, shape = parts["packed"], parts["scale"], parts["shape"]
        if codes is None or scales is None or shape is None:
            raise CheckpointError(f"of {name} a part is missing (_packed, _scale, _shape); copy the checkpoint again")
        if parts["g_idx"] is not None:
            raise UnknownQuantisationError(f"groups in the order of activations ({name}_g_idx)")
        sizes = torch.Size(files.mapped(shape).tolist())
        yield name, groups_of(name, sizes, codes, scales, parts["zero_point"])


_PACKED_WORDS = "pack-quantized"


def groups_of(
    name: str, shape: torch.Size, codes: StoredTensor, scales: StoredTensor, zeros: StoredTensor | None
) -> StoredWeight:
    """Return a weight in groups, whose parts lie as `Groups` reads them."""
    if len(shape) != 2 or len(codes.shape) != 2 or len(scales.shape) != 2 or not all(shape):
        raise UnknownQuantisationError(f"{name} of shape {list(shape)}")
    format = Groups(32 * codes.shape[1] // shape[1], shape[1] // scales.shape[1], zeros is None, _name(scales.dtype))
    return _located(
        name, shape, format, {"codes": codes, "scales": scales, "zeros": zeros or replace(codes, shape=(0,))}
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _located(name: str, shape: torch.Size, format: Groups, parts: dict[str, StoredTensor]) -> StoredWeight:
    if not format.fits(shape):
        raise UnknownQuantisationError(f"{name} in {format}, with {shape[1]} inputs")
    for part, like in format.empty(shape, torch.device("meta")).parts.items():
        if parts[part].shape != tuple(like.shape) or parts[part].dtype != like.dtype:
            raise CheckpointError(
                f"the {part} of {name} are {parts[part].dtype} {list(parts[part].shape)}, and not {like.dtype} "
                f"{list(like.shape)}; copy the checkpoint again"
            )
    return StoredWeight(shape, parts["scales"].dtype, parts, format)


def _gptq(
    about: Mapping[str, Any], rest: dict[str, StoredTensor], files: WeightFiles
) -> Iterator[tuple[str, StoredWeight]]:
    """Take the weights of GPTQ out of the rest, by name: groups of inputs in their order, of 4 or 8 bits."""
    version = str(about.get("checkpoint_format") or "gptq")
    if version not in ("gptq", "gptq_v2") or about.get("dynamic"):
        raise UnknownQuantisationError(f"GPTQ in {'settings by layer' if about.get('dynamic') else version}")
    bits, less = about.get("bits"), int(version == "gptq")
    if bits not in (4, 8):
        raise UnknownQuantisationError(f"GPTQ in {bits} bits")
    for layer in _by_output(rest):
        name, parts = layer.name, layer.parts
        words, groups = parts["qweight"].shape[0], parts["scales"].shape[0]
        inputs = words * 32 // bits
        size = inputs // groups
        if layer.order is not None and not torch.equal(files.mapped(layer.order).long(), torch.arange(inputs) // size):
            raise UnknownQuantisationError(f"groups in the order of activations ({name}.g_idx)")
        # Libraries differ in what is 1 more than the largest.
        if less and bool((unpacked(files.mapped(parts["qzeros"]), bits) == (1 << bits) - 1).any()):
            raise UnknownQuantisationError(f"zeros that are read in two ways ({name}.qzeros)")
        format = WordsOfGptq(bits, size, scale=_name(parts["scales"].dtype), less=less)
        shape = torch.Size((parts["scales"].shape[1], inputs))
        yield f"{name}.weight", _located(f"{name}.weight", shape, format, parts)


def _awq(about: Mapping[str, Any], rest: dict[str, StoredTensor], _: WeightFiles) -> Iterator[tuple[str, StoredWeight]]:
    """Take the weights of AWQ out of the rest, by name: 4 bits with zeros."""
    version = str(about.get("version") or about.get("format") or "gemm").lower()
    if version != "gemm":
        raise UnknownQuantisationError(f"AWQ in {version}")
    for layer in _by_output(rest):
        name, parts = layer.name, layer.parts
        inputs, (groups, outputs) = parts["qweight"].shape[0], parts["scales"].shape
        format = WordsOfAwq(4, inputs // groups, scale=_name(parts["scales"].dtype))
        yield f"{name}.weight", _located(f"{name}.weight", torch.Size((outputs, inputs)), format, parts)


@dataclass(frozen=True)
class _Layer:
    """Names a quantised layer and locates its parts; `order`: the group of each input."""

    name: str
    parts: dict[str, StoredTensor]
    order: StoredTensor | None


def _by_output(rest: dict[str, StoredTensor]) -> Iterator[_Layer]:
    """Take the layers whose outputs lie side by side out of the rest."""
    for name in [each.removesuffix(".qweight") for each in rest if each.endswith(".qweight")]:
        parts = {part: rest.pop(f"{name}.{part}", None) for part in WordsOfGptq.parts}
        found = {part: each for part, each in parts.items() if each is not None and len(each.shape) == 2}
        if len(found) < len(parts):
            raise CheckpointError(f"of {name} a part is missing ({', '.join(parts)}); copy the checkpoint again")
        yield _Layer(name, found, rest.pop(f"{name}.g_idx", None))


def why_not_read(folder: Path, config: PreTrainedConfig) -> str | None:
    """Say why no kernel reads the quantised weights in a folder, by their headers; None: they are read."""
    about = quantisation_of(config)
    if about is None:
        return "weights that are not quantised"
    try:
        quantised_weights(about, stored_tensors(weight_files(folder, config)), WeightFiles())
    except UnknownQuantisationError as error:
        return str(error)
    return None


_Method = Callable[[Mapping[str, Any], dict[str, StoredTensor], WeightFiles], Iterator[tuple[str, StoredWeight]]]
_METHODS: dict[str, _Method] = {"compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq}
