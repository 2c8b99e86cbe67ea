"""Rotary positions in one step on a CUDA device with Triton: as ten operations they take longer than a product."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.kernels.trial import runs_triton
from selfspec.model.view import copied, same_code, view_of

_ROTATE, _HALF = "apply_rotary_pos_emb", "rotate_half"


def for_rotary(module: nn.Module) -> nn.Module:
    """Make a view of a model, or a part of one, whose attentions rotate queries and keys in one step; else itself."""
    devices = {weight.device for weight in module.parameters()}
    return view_of(module, _in_one_step) if any(map(runs_triton, devices)) else module


def _in_one_step(module: nn.Module, others: Mapping[str, nn.Module]) -> nn.Module | None:
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or others or not _turns_halves(forward):
        return None
    weight = next(module.parameters(), None)
    if weight is None or not runs_triton(weight.device):
        return None
    names = {**forward.__globals__, _ROTATE: partial(_rotated, forward.__globals__[_ROTATE])}
    written = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    written.__kwdefaults__ = forward.__kwdefaults__
    view = copied(module)
    # Bound, so that a view of this one binds it to itself.
    view.__dict__["forward"] = MethodType(written, view)
    return view


def _turns_halves(forward: FunctionType) -> bool:
    """Return whether the code of an attention rotates queries and keys as `_apply_rotary_pos_emb` does."""
    if _ROTATE not in forward.__code__.co_names:
        return False
    rotate, half = (forward.__globals__.get(name) for name in (_ROTATE, _HALF))
    return same_code(rotate, _apply_rotary_pos_emb) and same_code(half, rotate_half)


def _rotated(stock: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    tensors = q, k, cos, sin
    usual = unsqueeze_dim == 1 and q.dim() == k.dim() == 4 and cos.dim() == 3 and _fit(*tensors)
    alike = len({each.dtype for each in tensors}) == 1 and not any(each.requires_grad for each in tensors)
    if not usual or not alike or not runs_triton(q.device) or q.numel() == 0:
        return stock(q, k, cos, sin, unsqueeze_dim)
    from selfspec.kernels.triton_rotary import DTYPES, rotated

    return rotated(q, k, cos, sin) if q.dtype in DTYPES else stock(q, k, cos, sin, unsqueeze_dim)


def _fit(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the kernel reads these shapes and layouts: cosines and sines must have the same layout."""
    rows, _, tokens, width = q.shape
    turns = cos.shape[0] in (1, rows) and cos.shape[1:] == (tokens, width) and width % 2 == 0
    same = cos.shape == sin.shape and cos.stride() == sin.stride()
    return turns and same and (k.shape[0], *k.shape[2:]) == (rows, tokens, width)


def rotate_half(x: Tensor) -> Tensor:
    """Exchange the halves of a head, one with its sign changed, as the modules of `transformers` compute it."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """Rotary positions (Su et al., 2021) as the modules of `transformers` compute them, most of them to the letter."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
