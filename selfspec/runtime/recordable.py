"""Check whether a model's passes can be recorded: equal inputs must always take the same path through its code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from transformers import PreTrainedModel

from selfspec.errors import UnsupportedModelError
from selfspec.formats.packed import PackedLinear
from selfspec.model.decodable import GLOBAL_HOOKS, has_hooks
from selfspec.model.view import copied, has_other_forward, is_streamed

# Modules of these are known to decide alike in every call.
_KNOWN = ("torch.nn.", "transformers.", "selfspec.")


def why_not(model: nn.Module) -> str | None:
    """Say why this stock model cannot be recorded now; None: it can be, but for passes that stream weights."""
    if any(GLOBAL_HOOKS):
        return "every module of this process has hooks"
    for name, module in model.named_modules():
        kind = type(module)
        if is_streamed(module):
            continue
        if not f"{kind.__module__}.".startswith(_KNOWN):
            return (
                f"{name or 'the model'} is a {kind.__module__}.{kind.__qualname__}, which may act differently next time"
            )
        if has_other_forward(module):
            return f"the forward of {name or 'the model'} was replaced"
        if has_hooks(module):
            return f"{name or 'the model'} has hooks"
    known = {
        id(weight)
        for module in model.modules()
        if is_streamed(module) or isinstance(module, PackedLinear)
        for weight in module.parameters()
    }
    for name, weight in model.named_parameters():
        if id(weight) in known:
            continue
        if type(weight) is not nn.Parameter or weight.is_meta or not weight.dtype.is_floating_point:
            return f"{name} is quantised or offloaded"
    return None


def is_watched(device: torch.device) -> bool:
    """Return whether a torch mode or autocast, which sees or changes every operation, is active for a device."""
    return (
        _get_current_dispatch_mode() is not None
        # A default device is such a mode too.
        or any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
        or torch.is_autocast_enabled(device.type)
    )


def frozen_view(module: nn.Module) -> nn.Module:
    """Make a view whose weights, in the same memory, need no gradient: others cannot be part of a recording.

    The view has its own holders of weights and buffers, so other tensors can be swapped in.
    """
    view = copied(module)
    view.__dict__["_buffers"] = dict(module._buffers)
    view.__dict__["_parameters"] = {
        name: None if weight is None else nn.Parameter(weight.detach(), requires_grad=False)
        for name, weight in module._parameters.items()
    }
    view.__dict__["_modules"] = {
        name: None if child is None else frozen_view(child) for name, child in module._modules.items()
    }
    if isinstance(module, PreTrainedModel):
        # It would search for padding in every pass without a mask.
        view.__dict__["warn_if_padding_and_no_attention_mask"] = _not_warning
    return view


def _not_warning(*_: object) -> None:
    return


def run_watched(function: Callable[[], Any]) -> Any:
    """Run a pass once and check that no decision in it depends on values of tensors.

    Raises:
        UnsupportedModelError: a decision does; a recording would repeat it for all inputs.
    """
    with _NoReading(), _NoTaking():  # type: ignore[no-untyped-call]
        return function()


class _NoTaking(TorchFunctionMode):
    """Refuses to pass values of tensors to Python or NumPy, which no torch operation shows."""

    _TAKING = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._TAKING:
            raise UnsupportedModelError(f"a pass of this model depends on values through {func.__name__}")
        return func(*args, **(kwargs or {}))


class _NoReading(TorchDispatchMode):
    """Refuses to turn values of tensors into numbers or shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor | Any:
        if reads_values(func, args):
            raise UnsupportedModelError(f"a pass of this model depends on values through {func}")
        return func(*args, **(kwargs or {}))


def reads_values(func: Any, args: Any) -> bool:
    """Return whether a torch operation turns values of tensors into numbers or shapes, which waits for the device."""
    if func is torch.ops.aten.index.Tensor and not any(_is_chosen_by(index) for index in args[1]):
        return False
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def _is_chosen_by(index: Tensor | None) -> bool:
    """Return whether an index is a mask, so that the shape of the result depends on its values."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)
