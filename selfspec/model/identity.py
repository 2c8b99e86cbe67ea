"""Bind files of drafts to a model: to its weights, by a fingerprint."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from selfspec.errors import SelfSpecError, UnsupportedModelError
from selfspec.model.tensor_parallel import whole
from selfspec.model.view import is_streamed


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of ids of a model's head: logits per token."""
    head = model.get_output_embeddings()
    # Quantised layers may keep their weight in a function.
    sizes = (getattr(module, "out_features", None) for module in head.modules())
    return next((size for size in sizes if type(size) is int), None) or weight_of(head).shape[0]


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of an embedding or a head, also if another module wraps it, as PEFT's output cast does."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return weight
    # Other weights of a wrapper are smaller: biases, norms, low-rank additions.
    weights = [each for each in module.parameters() if each.ndim == 2]
    if not weights:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no weight of ids by numbers, as the embedding and the head of a model have; "
            "wrap the model before that module is put into it"
        )
    return max(weights, key=Tensor.numel)


# Values that are summed up at once: few enough to stay in a processor's cache.
_AT_ONCE = 1 << 18
# An odd number whose multiples spread over all 64 bits: 2 ** 64 over the golden ratio.
_SPREAD = -7046029254386353131


@torch.no_grad()
def fingerprint(model: nn.Module, rounded: torch.dtype = torch.bfloat16) -> str:
    """Return the SHA-256 over the class, active adapters, and name, shape and values of each weight, packed ones too.

    Rounded to bfloat16, a checkpoint has one fingerprint in all dtypes but float16; to float32, rounded weights differ.
    """
    # Scales of packed weights are only in the state dict; of its variables, packed ones are made dense one by one.
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    found = {name: sums(value, rounded) for name, value in state.items() if not value.is_meta}
    for path, module in model.named_modules():
        if is_streamed(module):
            with module.__dict__["streams"]() as lent:
                found |= {
                    f"{path}.{name}": sums(weight, rounded) for name, weight in lent.named_parameters(recurse=False)
                }
    digest = hashlib.sha256(f"{type(model).__name__}\n".encode())
    for path, module in model.named_modules():
        # In layers of peft, active adapters and their scaling are no weights.
        if isinstance(getattr(module, "disable_adapters", None), bool):
            ran = [] if module.disable_adapters else module.active_adapters
            digest.update(f"{path} {ran} {sorted(getattr(module, 'scaling', {}).items())}\n".encode())
    for name, value in sorted(state.items()):
        if name not in found:
            raise ValueError(f"{name} is not in memory")
        digest.update(f"{name} {tuple(value.shape)}\n".encode())
        digest.update(found[name].numpy().tobytes())
    return digest.hexdigest()


def sums(weight: Tensor, rounded: torch.dtype = torch.bfloat16) -> Tensor:
    """Sum up the bits of values in parts, as 64-bit words times an odd number of their place, modulo 2 ** 64."""
    flat = whole(weight.detach()).reshape(-1)
    factors = torch.arange(_AT_ONCE, device=flat.device).mul_(_SPREAD).bitwise_or_(1)
    parts = []
    for part in flat.split(_AT_ONCE):
        values = part.to(rounded) if part.is_floating_point() and part.itemsize > 1 else part
        raw = values.contiguous().view(torch.uint8)
        lanes = pad(raw, (0, -len(raw) % 8)).view(torch.int64)
        parts.append((lanes * factors[: len(lanes)]).sum())
    return torch.stack(parts).cpu() if parts else factors[:0].cpu()


def first_away(model: nn.Module) -> str | None:
    """Return the name of a parameter that is not in memory; None: all are."""
    return next((name for name, weight in model.named_parameters() if weight.is_meta), None)


def check_base(model: nn.Module, base: str, source: str, error: type[SelfSpecError], remedy: str) -> None:
    """Refuse a model whose fingerprint is not the base of the source."""
    away = first_away(model)
    if away is not None:
        raise error(f"the weights cannot be compared with the base of {source}: {away} is not in memory")
    found = fingerprint(model)
    if found != base:
        raise error(
            f"{source} is of another base: its fingerprint is {base[:12]}, this model's {found[:12]}. Load that base "
            f"(not in float16), or {remedy}"
        )
