"""Locate the weights of checkpoints that other libraries quantised, which stay in the bytes in which they lie."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from selfspec.errors import CheckpointError
from selfspec.formats.coded import Float8, Groups, MxFp4, NormalFloat4, NvFp4, WordsOfAwq, WordsOfGptq, unpacked
from selfspec.formats.format import Format
from selfspec.model.checkpoint import weight_files
from selfspec.placement.stored import StoredTensor, StoredWeight, WeightFiles, stored_tensors

About = Mapping[str, Any]
"""A configuration's table of how weights are quantised."""

Rest = dict[str, StoredTensor]
"""Tensors in the files that are no part of a quantised weight as far as is known, by name."""

Weights = Iterator[tuple[str, StoredWeight]]
"""Quantised weights, by name."""


class UnknownQuantisationError(Exception):
    """Says why no kernel reads the weights of a quantised checkpoint: such models run as their library loads them."""


def quantisation_of(config: PreTrainedConfig) -> About | None:
    """Return what a configuration says of how weights are quantised; None: they are not."""
    for place in (config, config.get_text_config(decoder=True)):
        found = getattr(place, "quantization_config", None)
        if found is not None:
            return found if isinstance(found, Mapping) else found.to_dict()
    return None


def is_made_dense(about: About) -> bool:
    """Return whether the loader makes weights of this method dense by itself, on a CPU."""
    return about.get("quant_method") in ("fp8", "mxfp4")


def without_quantisation(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a configuration that says nothing of it: modules are those of the dense model."""
    found = copy.deepcopy(config)
    for place in (found, found.get_text_config(decoder=True)):
        if getattr(place, "quantization_config", None) is not None:
            del place.quantization_config
    return found


def quantised_weights(about: About, stored: Mapping[str, StoredTensor], files: WeightFiles) -> dict[str, StoredWeight]:
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
        raise UnknownQuantisationError(f"dense weights that config.json says are in {method}")
    return found | {name: StoredWeight.dense(each) for name, each in rest.items()}


def _compressed(about: About, rest: Rest, files: WeightFiles) -> Weights:
    """Take the weights of compressed-tensors out of the rest, by name: integers in words, and floats of 4 or 8 bits."""
    groups = about.get("config_groups") or {}
    schemes = [each for each in groups.values() if isinstance(each, Mapping)]
    kept = {str(each.get("format") or about.get("format")) for each in schemes}
    if kept - _COMPRESSED:
        raise UnknownQuantisationError(f"compressed-tensors in {' and '.join(sorted(kept - _COMPRESSED))}")
    if any(each.get("input_activations") or each.get("output_activations") for each in schemes):
        raise UnknownQuantisationError("compressed-tensors with rounded activations")
    for more in ("kv_cache_scheme", "transform_config"):
        if about.get(more):
            raise UnknownQuantisationError(f"compressed-tensors with {more}")
    for name in [each.removesuffix("_packed") for each in rest if each.endswith(".weight_packed")]:
        named = ("scale", "shape", "zero_point", "g_idx", "global_scale")
        parts = {part: each for part in named if (each := rest.pop(f"{name}_{part}", None)) is not None}
        codes = rest.pop(f"{name}_packed")
        if "g_idx" in parts:
            raise UnknownQuantisationError(f"groups in the order of activations ({name}_g_idx)")
        if "scale" not in parts or (codes.dtype != torch.uint8 and "shape" not in parts):
            raise CheckpointError(f"of {name} a part is missing (_packed, _scale, _shape); copy the checkpoint again")
        if codes.dtype == torch.uint8:
            # NVFP4, whose scales are over a divisor, or else MXFP4.
            shape = torch.Size((*codes.shape[:-1], 2 * codes.shape[-1]))
            held = {"codes": codes, "scales": replace(parts["scale"], dtype=torch.uint8)}
            if "global_scale" in parts:
                held["divisor"] = parts["global_scale"]
            yield name, _located(name, shape, NvFp4() if "divisor" in held else MxFp4(), held, torch.bfloat16)
        else:
            sizes = torch.Size(files.mapped(parts["shape"]).tolist())
            yield name, groups_of(name, sizes, codes, parts["scale"], parts.get("zero_point"))
    for name in [each.removesuffix("_scale") for each in rest if each.endswith(".weight_scale")]:
        yield name, _in_floats_of_8_bits(name, rest.pop(name, None), rest.pop(f"{name}_scale"))


_COMPRESSED = {"pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "float-quantized", "naive-quantized"}


def groups_of(
    name: str, shape: torch.Size, codes: StoredTensor, scales: StoredTensor, zeros: StoredTensor | None
) -> StoredWeight:
    """Return a weight in groups, whose parts lie as `Groups` reads them."""
    if len(shape) != 2 or len(codes.shape) != 2 or len(scales.shape) != 2 or not all(shape):
        raise UnknownQuantisationError(f"{name} of shape {list(shape)}")
    format = Groups(32 * codes.shape[1] // shape[1], shape[1] // scales.shape[1], zeros is None, _name(scales.dtype))
    parts = {"codes": codes, "scales": scales, "zeros": zeros or replace(codes, shape=(0,))}
    return _located(name, shape, format, parts, scales.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _located(
    name: str, shape: torch.Size, format: Format, parts: dict[str, StoredTensor], dtype: torch.dtype
) -> StoredWeight:
    if not format.fits(shape):
        raise UnknownQuantisationError(f"{name} in {format}, with {shape[-1]} inputs")
    for part, like in format.empty(shape, torch.device("meta")).parts.items():
        if parts[part].shape != tuple(like.shape) or parts[part].dtype != like.dtype:
            raise CheckpointError(
                f"the {part} of {name} are {parts[part].dtype} {list(parts[part].shape)}, and not {like.dtype} "
                f"{list(like.shape)}; copy the checkpoint again"
            )
    return StoredWeight(shape, dtype, parts, format)


def _gptq(about: About, rest: Rest, files: WeightFiles) -> Weights:
    """Take the weights of GPTQ out of the rest, by name: groups of inputs in their order, of 4 or 8 bits."""
    version = str(about.get("checkpoint_format") or "gptq")
    if version not in ("gptq", "gptq_v2") or about.get("dynamic"):
        raise UnknownQuantisationError(f"GPTQ in {'settings by layer' if about.get('dynamic') else version}")
    bits, less = about.get("bits"), int(version == "gptq")
    if bits not in (4, 8):
        raise UnknownQuantisationError(f"GPTQ in {bits} bits")
    for name, parts in _by_output(rest):
        inputs = parts["qweight"].shape[0] * 32 // bits
        size, order = inputs // parts["scales"].shape[0], parts.pop("g_idx", None)
        if order is not None and not torch.equal(files.mapped(order).long(), torch.arange(inputs) // size):
            raise UnknownQuantisationError(f"groups in the order of activations ({name}.g_idx)")
        # Libraries differ in what is 1 more than the largest.
        if less and bool((unpacked(files.mapped(parts["qzeros"]), bits) == (1 << bits) - 1).any()):
            raise UnknownQuantisationError(f"zeros that are read in two ways ({name}.qzeros)")
        format = WordsOfGptq(bits, size, scale=_name(parts["scales"].dtype), less=less)
        shape = torch.Size((parts["scales"].shape[1], inputs))
        yield f"{name}.weight", _located(f"{name}.weight", shape, format, parts, parts["scales"].dtype)


def _awq(about: About, rest: Rest, _: WeightFiles) -> Weights:
    """Take the weights of AWQ out of the rest, by name: 4 bits with zeros."""
    version = str(about.get("version") or about.get("format") or "gemm").lower()
    if version != "gemm":
        raise UnknownQuantisationError(f"AWQ in {version}")
    for name, parts in _by_output(rest):
        parts.pop("g_idx", None)
        inputs, (groups, outputs) = parts["qweight"].shape[0], parts["scales"].shape
        format = WordsOfAwq(4, inputs // groups, scale=_name(parts["scales"].dtype))
        shape = torch.Size((outputs, inputs))
        yield f"{name}.weight", _located(f"{name}.weight", shape, format, parts, parts["scales"].dtype)


def _by_output(rest: Rest) -> Iterator[tuple[str, dict[str, StoredTensor]]]:
    """Take the layers whose outputs lie side by side out of the rest, by name: parts, and perhaps groups of inputs."""
    for name in [each.removesuffix(".qweight") for each in rest if each.endswith(".qweight")]:
        named = (*WordsOfGptq.parts, "g_idx")
        found = {part: each for part in named if (each := rest.pop(f"{name}.{part}", None)) is not None}
        if any(part not in found or len(found[part].shape) != 2 for part in WordsOfGptq.parts):
            missing = ", ".join(WordsOfGptq.parts)
            raise CheckpointError(f"of {name} a part is missing ({missing}); copy the checkpoint again")
        yield name, found


def _fp8(about: About, rest: Rest, _: WeightFiles) -> Weights:
    """Take the weights in floats of 8 bits out of the rest, by name: with a scale for each block, or for all."""
    if about.get("activation_scheme") != "dynamic":
        raise UnknownQuantisationError("FP8 with fixed scales of activations")
    for name in [each.removesuffix("_scale_inv") for each in rest if each.endswith(".weight_scale_inv")]:
        codes, scales = rest.pop(name, None), rest.pop(f"{name}_scale_inv")
        yield name, _in_floats_of_8_bits(name, codes, scales)


def _in_floats_of_8_bits(name: str, codes: StoredTensor | None, scales: StoredTensor) -> StoredWeight:
    """Return a weight with a scale for each row, for each block, or for all."""
    if codes is None:
        raise CheckpointError(f"{name} is missing beside its scales; copy the checkpoint again")
    if codes.dtype != torch.float8_e4m3fn or len(codes.shape) != 2 or not all(codes.shape):
        raise UnknownQuantisationError(f"{name} in {codes.dtype} {list(codes.shape)}")
    shape = torch.Size(codes.shape)
    if scales.numel == 1:
        scales = replace(scales, shape=(1, 1))
    if len(scales.shape) != 2 or shape[1] % scales.shape[1]:
        raise UnknownQuantisationError(f"{name} with scales {list(scales.shape)}")
    if scales.dtype == torch.float8_e8m0fnu:
        scales = replace(scales, dtype=torch.uint8)
    inputs, blocks = shape[1] // scales.shape[1], scales.shape[0]
    outputs = 1 if blocks == shape[0] else shape[0] if blocks == 1 else inputs
    format = Float8(inputs, outputs, _name(scales.dtype))
    parts = {"codes": replace(codes, dtype=torch.uint8), "scales": scales}
    return _located(name, shape, format, parts, torch.float32)


def _mxfp4(_about: About, rest: Rest, _: WeightFiles) -> Weights:
    """Take the weights of experts in MXFP4 out of the rest, by name; modules hold them as `[experts, in, out]`."""
    for name in [each.removesuffix("_blocks") for each in rest if each.endswith("_blocks")]:
        codes, scales = rest.pop(f"{name}_blocks"), rest.pop(f"{name}_scales", None)
        if scales is None or len(codes.shape) != 4:
            raise CheckpointError(
                f"{name}_blocks are {list(codes.shape)}, or have no scales; copy the checkpoint again"
            )
        experts, outputs, groups, size = codes.shape
        shape = torch.Size((experts, outputs, 2 * groups * size))
        parts = {"codes": replace(codes, shape=(experts, outputs, groups * size)), "scales": scales}
        yield name, replace(_located(name, shape, MxFp4(), parts, torch.bfloat16), transposed=True)


def _bitsandbytes(about: About, rest: Rest, files: WeightFiles) -> Weights:
    """Take the weights of bitsandbytes in 4 bits out of the rest, by name."""
    if not about.get("load_in_4bit"):
        raise UnknownQuantisationError("bitsandbytes in 8 bits")
    for key in [each for each in rest if ".quant_state." in each]:
        name = key.partition(".quant_state.")[0]
        state = json.loads(bytes(files.mapped(rest.pop(key)).tolist()))
        parts = {part: rest.pop(name + suffix, None) for part, suffix in _OF_BITSANDBYTES.items()}
        codes, scales, table = parts["codes"], parts["scales"], parts["table"]
        if codes is None or scales is None or table is None or codes.nbytes * 2 != torch.Size(state["shape"]).numel():
            raise CheckpointError(f"of {name} a part is missing (absmax, quant_map); copy the checkpoint again")
        shape, inputs, rounded = torch.Size(state["shape"]), state["blocksize"], parts["factors"] is not None
        if len(shape) != 2 or shape[1] % inputs or (rounded and state["nested_blocksize"] != 256):
            raise UnknownQuantisationError(f"{name} {list(shape)} in blocks of {inputs}")
        found = {part: each or replace(table, shape=(0,)) for part, each in parts.items()}
        found["codes"] = replace(codes, shape=(shape[0], shape[1] // 2), dtype=torch.uint8)
        found["scales"] = replace(scales, shape=(shape[0], shape[1] // inputs))
        format = NormalFloat4(inputs, rounded, state.get("nested_offset", 0.0))
        yield name, _located(name, shape, format, found, torch.float32)


_OF_BITSANDBYTES = {
    "codes": "",
    "scales": ".absmax",
    "table": ".quant_map",
    "steps": ".nested_quant_map",
    "factors": ".nested_absmax",
}


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


_METHODS: dict[str, Callable[[About, Rest, WeightFiles], Weights]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
