"""RMSNorm in one step: as six operations it takes longer than a product.

On a CPU where selfspec's kernels were built, on a CUDA device where Triton runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.kernels import native
from selfspec.kernels.trial import runs_triton
from selfspec.model.view import same_code, view_of, view_running


def for_norms(module: nn.Module) -> nn.Module:
    """Make a view of a model, or a part of one, whose norms are one operation each; itself if there are none."""
    return view_of(module, _in_one_step)


def _in_one_step(module: nn.Module, _: Mapping[str, nn.Module]) -> nn.Module | None:
    weight = getattr(module, "weight", None)
    if type(weight) is not nn.Parameter or not same_code(type(module).forward, _rms_norm):
        return None
    step = _step(weight)
    return None if step is None else view_running(module, partial(step, module))


def _step(weight: Tensor) -> Callable[[nn.Module, Tensor], Tensor] | None:
    if runs_triton(weight.device):
        return _by_triton
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32
    return _native if fits and native.load_kernels() else None


def _native(module: nn.Module, states: Tensor) -> Tensor:
    if states.dtype != torch.float32:
        return _rms_norm(module, states)
    return native.rms_norm(states, module.weight, module.variance_epsilon)  # type: ignore[arg-type]


def _by_triton(module: nn.Module, states: Tensor) -> Tensor:
    # It is not everywhere.
    from selfspec.kernels.triton_norms import MOST_OFF, tried_norm

    stock, weight = partial(_rms_norm, module, states), module.weight
    assert isinstance(weight, Tensor)
    needs_gradient = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    if needs_gradient or states.dtype not in MOST_OFF or states.dtype != weight.dtype or states.numel() == 0:
        return stock()
    return tried_norm(states, weight, float(module.variance_epsilon), stock=stock)  # type: ignore[arg-type]


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """RMSNorm (Zhang and Sennrich, 2019) as the modules of `transformers` compute it, most of them to the letter."""
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)  # type: ignore[no-any-return]
