"""Checkpoints as quantising libraries lay them out, written by hand, beside the dense models that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes, `[rows, codes]`, in int32, the first in the lowest bits."""
    padded = nn.functional.pad(codes, (0, -codes.shape[1] % (32 // bits))).long().unflatten(1, (-1, 32 // bits))
    whole = (padded << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(whole < 1 << 31, whole, whole - (1 << 32)).to(torch.int32)


def grouped(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight, `[out, in]`: codes `[out, in]`, scales and zeros `[out, groups]`."""
    parts = weight.float().unflatten(1, (-1, group))
    levels = (1 << bits) - 1
    low, high = parts.amin(2), parts.amax(2)
    if symmetric:
        low, high = -torch.maximum(high, -low), torch.maximum(high, -low)
    scales = ((high - low) / levels).clamp(min=1e-6).to(weight.dtype)
    zeros = torch.full_like(low, 1 << bits - 1) if symmetric else (-low / scales.float()).round().clamp(1, levels)
    codes = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, levels)
    return codes.flatten(1).int(), scales, zeros.int()


def dense(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The weight that the codes stand for, in float32."""
    parts = codes.unflatten(1, (scales.shape[1], -1))
    found: Tensor = (parts - zeros[..., None]).float() * scales.float()[..., None]
    return found.flatten(1)


def compressed(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, symmetric: bool) -> dict[str, Tensor]:
    """Lay a weight out as compressed-tensors does in `pack-quantized`."""
    made = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(codes.shape)}
    return made if symmetric else made | {"weight_zero_point": words(zeros.t(), bits).t().contiguous()}


def compressed_config(bits: int, symmetric: bool, group: int) -> dict[str, object]:
    """What config.json says of it."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


def gptq(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, less: int = 1) -> dict[str, Tensor]:
    """Lay a weight out as GPTQ does: `less` is 1 in the first version, and 0 in the second."""
    order = torch.arange(codes.shape[1], dtype=torch.int32) // (codes.shape[1] // scales.shape[1])
    found = {"qweight": words(codes, bits).t(), "scales": scales.half().t(), "qzeros": words(zeros.t() - less, bits)}
    return {**found, "g_idx": order}


def awq(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    """Lay a weight out as AWQ does: words of eight outputs, the even ones first."""
    order = torch.arange(codes.shape[0]).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    inside = (words(each.t()[:, order], 4) for each in (codes, zeros))
    return {"qweight": next(inside), "scales": scales.half().t(), "qzeros": next(inside)}


def in_groups(
    bits: int, group: int, symmetric: bool, layout: Callable[..., dict[str, Tensor]]
) -> Callable[[Tensor], LaidOut]:
    """Round weights to integers, laid out by `layout(codes, scales, zeros)`."""

    def laid_out(weight: Tensor) -> LaidOut:
        parts = grouped(weight, bits, group, symmetric)
        return LaidOut(layout(*parts), dense(*parts))

    return laid_out


def float8(weight: Tensor, rows: int = 16, columns: int = 16) -> LaidOut:
    """Round a weight to floats of 8 bits with a scale for each block, as transformers' FP8 has them."""
    blocks = weight.float().view(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scales).to(torch.float8_e4m3fn)
    parts = {"weight": codes.view(weight.shape), "weight_scale_inv": scales[:, 0, :, 0]}
    return LaidOut(parts, (codes.float() * scales).view(weight.shape))


def scaled_float8(weight: Tensor, rows: int = 1) -> LaidOut:
    """Round a weight as compressed-tensors does in `float-quantized`, with a scale for some rows."""
    made = float8(weight, rows, weight.shape[1])
    scales = made.parts["weight_scale_inv"]
    return LaidOut({"weight": made.parts["weight"], "weight_scale": scales}, made.dense)


def nvfp4(weight: Tensor) -> LaidOut:
    """Round a weight to floats of 4 bits as compressed-tensors does in `nvfp4-pack-quantized`."""
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers, groups = torch.cat([half, -half]), weight.float().unflatten(1, (-1, 16))
    sizes = groups.abs().amax(2) / 6
    divisor = (448 / sizes.amax()).view(1)
    scales = (sizes * divisor).to(torch.float8_e4m3fn)
    steps = scales.float() / divisor
    codes = (groups / steps[..., None])[..., None].sub(numbers).abs().argmin(-1)
    inside = codes.flatten(1).byte()
    parts = {"weight_packed": inside[:, ::2] | inside[:, 1::2] << 4, "weight_scale": scales}
    dense = (numbers[codes] * steps[..., None]).flatten(1)
    return LaidOut(parts | {"weight_global_scale": divisor}, dense)


FP8: dict[str, object] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


def normal_float4(weight: Tensor, rounded: bool) -> LaidOut:
    """Round a weight to numbers of a table as bitsandbytes lays them out, its scales as well if they are `rounded`."""
    table = torch.linspace(-1, 1, 16) ** 3
    blocks = weight.float().view(-1, 16)
    scales = blocks.abs().amax(1)
    parts = {"weight.quant_map": table}
    state: dict[str, Any] = {"blocksize": 16, "shape": list(weight.shape), "dtype": "bfloat16"}
    if rounded:
        steps, added = torch.linspace(-1, 1, 256), scales.mean()
        factors = torch.stack([(each - added).abs().amax() for each in scales.split(256)])
        of_each = factors.repeat_interleave(256)[: len(scales)]
        places = ((scales - added) / of_each)[:, None].sub(steps).abs().argmin(1)
        scales = steps[places] * of_each + added
        parts |= {"weight.absmax": places.byte(), "weight.nested_quant_map": steps, "weight.nested_absmax": factors}
        state |= {"nested_blocksize": 256, "nested_offset": added.item()}
    else:
        parts["weight.absmax"] = scales
    codes = (blocks / scales[:, None])[..., None].sub(table).abs().argmin(-1)
    parts["weight"] = (codes.view(-1, 2)[:, :1] << 4 | codes.view(-1, 2)[:, 1:]).byte()
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return LaidOut(parts, (table[codes] * scales[:, None]).view(weight.shape))


@dataclass(frozen=True)
class LaidOut:
    """Holds a quantised weight by the names behind its layer's, and what it stands for, `[out, in]` in float32."""

    parts: Mapping[str, Tensor]
    dense: Tensor


def save_quantised(
    model: PreTrainedModel, folder: Path, laid_out: Callable[[Tensor], LaidOut], about: dict[str, object]
) -> PreTrainedModel:
    """Save a model whose linear layers, but the head, are quantised; return it with their dense weights, in float32."""
    model.save_pretrained(folder)
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    for name, module in found.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            made = laid_out(tensors.pop(f"{name}.weight"))
            tensors |= {f"{name}.{part}": each.contiguous() for part, each in made.parts.items()}
            module.weight.data = made.dense
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": about}))
    return found
