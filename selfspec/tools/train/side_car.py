"""Writing a side-car: exit heads as safetensors, and JSON that says which base they belong to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from selfspec.draft.exit_head import CONFIG, FORMAT, WEIGHTS
from selfspec.tools.train.exit_heads import ExitHeads


def write_side_car(
    heads: ExitHeads,
    tokens: Tensor | None,
    default: int,
    base: str,
    dtype: torch.dtype,
    validation: Mapping[str, float],
    folder: Path,
) -> None:
    """Write what `ExitHead.from_pretrained` reads.

    Args:
        heads: trained.
        tokens: ids that can be drafted; None: all.
        default: the exit that is used when none is named.
        base: fingerprint of the base's weights.
        dtype: what the weights are saved in.
        validation: figures on held-out text.
        folder: where; it exists.
    """
    tensors = {name: value.to("cpu", dtype).contiguous() for name, value in heads.state_dict().items()}
    if tokens is not None:
        tensors["tokens"] = tokens.to("cpu", torch.int32)
    content = save(tensors)
    config: dict[str, Any] = {
        "format": FORMAT,
        "exits": [int(name) for name in heads.exits],
        "default": default,
        "hidden": heads.hidden,
        "rank": heads.rank,
        "base": base,
        "sha256": hashlib.sha256(content).hexdigest(),
        "validation": dict(validation),
    }
    (folder / WEIGHTS).write_bytes(content)
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
