"""The fingerprint of a model's weights: what binds to a base that which was trained on it."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from selfspec.errors import SelfSpecError
from selfspec.model.tensor_parallel import whole

# Values looked at in each tensor. Another training moves nearly all values, so a sample sees it, and the weights of a
# large model are not read through each time it is wrapped.
_SAMPLE = 65_536


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over the class, and over name, shape and evenly spaced values of every weight.

    Values are rounded to bfloat16 first, so that a checkpoint has one fingerprint in whatever dtype it is loaded
    (but for float16, whose own rounding may differ). Offloaded weights, which are not there to be read, are refused.

    Raises:
        ValueError: a weight is on the meta device.
    """
    digest = hashlib.sha256(f"{type(model).__name__}\n".encode())
    for name, weight in sorted(model.named_parameters()):
        if weight.is_meta:
            raise ValueError(f"{name} is not in memory")
        flat = whole(weight.detach()).reshape(-1)
        sample = flat[:: -(-flat.numel() // _SAMPLE)] if flat.numel() else flat
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        digest.update(sample.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def check_base(model: nn.Module, base: str, source: str, error: type[SelfSpecError], remedy: str) -> None:
    """Refuse a model for what belongs to weights of another fingerprint.

    Raises:
        SelfSpecError: of type `error`, naming the source and the remedy.
    """
    try:
        found = fingerprint(model)
    except ValueError as reason:
        raise error(f"the weights cannot be compared with the base of {source}: {reason}") from reason
    if found != base:
        raise error(
            f"{source} is of another base: its fingerprint is {base[:12]}, this model's {found[:12]}. Load that base "
            f"(not in float16), or {remedy}"
        )
