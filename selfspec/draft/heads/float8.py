"""Weights in float8, each block of them with a scale of its own, as DeepSeek-V3 and others after it are published."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from selfspec.errors import HeadError

SCALE = "_scale_inv"
"""What the name of a weight has behind it in the name of its scales."""

_FLOAT8 = torch.float8_e4m3fn
_USUAL = (128, 128)
# What layouts that are not read call the parts of a weight.
_OTHERS = (
    *(".weight_packed", ".weight_scale", ".weight_scale_2", ".weight_shape", ".weight_zero_point"),
    *(".qweight", ".qzeros", ".scales", ".g_idx", ".absmax", ".quant_map", "_blocks", "_scales"),
)


def check_layout(names: Collection[str], config: Mapping[str, Any], source: str) -> None:
    """Refuse weights that are kept in few bits otherwise than in blocks of float8.

    Args:
        names: of weights.
        config: the checkpoint's configuration.
        source: where they are, for messages.

    Raises:
        HeadError: naming the layout.
    """
    other = next((name for name in names if name.endswith(_OTHERS)), None)
    if other is not None:
        raise _refused(_method(config), other, source)


def dequantised(weights: Mapping[str, Tensor], config: Mapping[str, Any], source: str) -> dict[str, Tensor]:
    """Multiply weights in float8 by the scales of their blocks, in float32; others stay as they are.

    Args:
        weights: by name, `[..., out, in]`; the scales `[..., blocks of out, blocks of in]`, the last ones of which may
            be cut off.
        config: the checkpoint's configuration, which may say how large blocks are.
        source: where they are, for messages.

    Raises:
        HeadError: a weight in few bits has no scales, or of another shape.
    """
    found = {name: weight for name, weight in weights.items() if not name.endswith(SCALE)}
    block = tuple(_quantisation(config).get("weight_block_size") or _USUAL)
    for name, weight in found.items():
        if weight.is_floating_point() and weight.element_size() > 1:
            continue
        scales = weights.get(f"{name}{SCALE}")
        if weight.dtype != _FLOAT8 or scales is None:
            raise _refused(_method(config), f"{name} in {weight.dtype}", source)
        wanted = (*weight.shape[:-2], *(-(-size // of) for size, of in zip(weight.shape[-2:], block, strict=True)))
        if scales.shape != wanted:
            raise HeadError(
                f"the scales of {name} in {source} are {list(scales.shape)}, and blocks of {list(block)} need "
                f"{list(wanted)}; copy config.json and the weights again"
            )
        spread = scales.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
        found[name] = weight.float() * spread[..., : weight.shape[-2], : weight.shape[-1]]
        if not found[name].isfinite().all():
            raise HeadError(f"the weight {name} in {source} is NaN or infinite; copy the checkpoint again")
    return found


def _quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inside = config.get("text_config")
    places = (config, inside if isinstance(inside, dict) else {})
    found = (place.get("quantization_config") for place in places)
    return next((each for each in found if isinstance(each, dict)), {})


def _method(config: Mapping[str, Any]) -> str:
    return str(_quantisation(config).get("quant_method") or "an unknown layout")


def _refused(method: str, what: str, source: str) -> HeadError:
    return HeadError(
        f"the weights in {source} are kept in few bits as {method} does ({what}), which is not read here; take a "
        "checkpoint in bfloat16, or in float8 with scales of blocks (weight_scale_inv)"
    )
