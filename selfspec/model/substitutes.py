"""Substitutes: the linear layers of a model in fewer bits, made once, for draft paths that run with them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from selfspec.kernels.low_bits import EightBitsLinear, FourBitsLinear, LowBitsLinear
from selfspec.model.layer_path import Precision
from selfspec.model.view import view_with

KERNEL_DEVICES = ("cpu", "cuda")
"""Devices that have kernels for fewer bits."""


@dataclass(frozen=True)
class _Made:
    """A substitute, and what it was made of.

    Attributes:
        linear: the substitute; None: the layer has none.
        device: of the weight.
        address: of its values. The weight itself is not kept: it may be replaced, and its memory freed.
        version: of its values, which counts changes in place.
    """

    linear: LowBitsLinear | None
    device: torch.device
    address: int
    version: int

    def fits(self, weight: Tensor) -> bool:
        """Whether it was made of this weight as it is now."""
        where = self.device == weight.device and self.address == weight.data_ptr()
        return where and self.version == weight._version


class Substitutes:
    """The linear layers of one model in fewer bits. Several threads may use them.

    Each is made when a path first asks for it, and again if the weight has changed since. What has no substitute runs
    exactly: layers that are no plain `nn.Linear` or `Conv1D`, quantised weights, and sizes that no kernel takes.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Precision, str], _Made] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Substitutes], tuple[()]]:
        # A copy makes its own: these belong to the weights in this memory.
        return Substitutes, ()

    @property
    def nbytes(self) -> int:
        """Bytes that all substitutes take."""
        return sum(made.linear.nbytes for made in self._made.values() if made.linear is not None)

    def within(self, module: nn.Module, name: str, precision: Precision) -> nn.Module:
        """Make a view of a part of the model whose linear layers are substitutes; the part itself if it has none.

        Args:
            module: a part of the model, or of a view of it.
            name: of the part in the model.
            precision: of the substitutes.
        """
        substitute = self._substitute(module, name, precision)
        if substitute is not None:
            return substitute
        children = {
            child_name: self.within(child, f"{name}.{child_name}", precision)
            for child_name, child in module._modules.items()
            if child is not None
        }
        others = {child: new for child, new in children.items() if new is not module._modules[child]}
        return view_with(module, others) if others else module

    def _substitute(self, module: nn.Module, name: str, precision: Precision) -> LowBitsLinear | None:
        weight = _matrix(module)
        if weight is None:
            return None
        with self._lock:
            made = self._made.get((precision, name))
            if made is None or not made.fits(weight):
                linear = _made(weight, getattr(module, "bias", None), precision)
                made = self._made[precision, name] = _Made(linear, weight.device, weight.data_ptr(), weight._version)
        return made.linear


def _matrix(module: nn.Module) -> Tensor | None:
    """The weight of a linear layer, `[out, in]`; None: the module is none whose product can be exchanged."""
    weight = getattr(module, "weight", None)
    if type(weight) is not nn.Parameter or not weight.dtype.is_floating_point or weight.is_meta:
        return None
    if type(module) is nn.Linear:
        return weight
    return weight.t() if type(module) is Conv1D else None


@torch.no_grad()
def _made(weight: Tensor, bias: Tensor | None, precision: Precision) -> LowBitsLinear | None:
    if precision.bits == 4 and weight.shape[1] % precision.group_size:
        return None
    try:
        linear = (
            EightBitsLinear(weight, bias) if precision.bits == 8 else FourBitsLinear(weight, bias, precision.group_size)
        )
        linear(weight.new_zeros(1, weight.shape[1]))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # The kernels say which sizes and devices they take by raising.
        return None
    return linear
