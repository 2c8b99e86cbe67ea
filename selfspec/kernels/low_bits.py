"""Define linear layers and experts in fewer bits, packed for the kernels of a device.

The products read a quarter or a sixth of float32's bytes. On a CPU they use selfspec's kernels if they were built (4
bits in groups of 32), on a CUDA device those in Triton if it is installed, and otherwise ATen's weight-only kernels,
which take bfloat16 inputs. They take plain tensors, so passes with them can be recorded. Rounding in a draft keeps
outputs exact: q is the distribution that the draft computes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from selfspec.kernels import native
from selfspec.kernels.rounded import RoundedWeight
from selfspec.kernels.trial import runs_triton

# With other numbers of inputs ATen's kernel for 8 bits (torch 2.13) reads past the weight: it crashes or is wrong.
_ATEN_INPUTS = 16
# ATen's kernel for 4 bits on a CUDA device takes multiples of these.
_ATEN_INPUTS_IN_FOUR_BITS, _ATEN_OUTPUTS = 128, 8
# A multiple of the rows in any block of ATen's kernels for 4 bits.
_ROWS_AT_ONCE = 1024
# Inputs and outputs of the weight that a device is tested with: every kernel takes it.
_PROBED = 128


class Kernels(Enum):
    """The library whose products run."""

    ATEN = auto()
    NATIVE = auto()
    TRITON = auto()


def kernels_of(device: torch.device) -> Kernels:
    """Return the fastest kernels for weights on a device."""
    if device.type == "cpu" and native.load_kernels():
        return Kernels.NATIVE
    return Kernels.TRITON if runs_triton(device) else Kernels.ATEN


@cache
def has_kernels(kind: str) -> bool:
    """Return whether layers in fewer bits run on a kind of device, such as "cuda", as a small product shows."""
    if kind in ("cpu", "cuda", "meta"):
        return kind != "meta"
    try:
        row = torch.zeros(1, _PROBED, dtype=torch.bfloat16, device=kind)
        levels, scales = torch.zeros(_PROBED, _PROBED, device=kind), row.new_ones(_PROBED)
        torch.ops.aten._weight_int8pack_mm(row, levels.to(torch.int8), scales)
        torch.ops.aten._convert_weight_to_int4pack(levels[:, ::2].to(torch.uint8).contiguous(), 8)
    # A missing operation is a NotImplementedError, which is a RuntimeError.
    except RuntimeError:
        return False
    return True


class LowBitsLinear(nn.Module, ABC):
    """A linear layer whose weight is kept in fewer bits; its output approximates the original layer's.

    Args:
        rounded: the layer's weight, `[out, in]`.
        bias: bias of the layer, `[out]`; None: it has none. It is not copied.
        dtype: dtype of the layer.

    Attributes:
        bias: the same bias.
        in_features, out_features: sizes of the layer, for modules that read them.

    Raises:
        RuntimeError: no kernel takes this size.
    """

    bias: Tensor | None

    def __init__(self, rounded: RoundedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self._dtype = rounded.inputs, rounded.levels.shape[0], dtype
        self.factors = _fixed(rounded.factors)
        self.register_parameter("bias", None if bias is None else _fixed(bias.detach()))

    @property
    def weight(self) -> Tensor:
        """The rounded weight, `[out, in]`, for modules that read it.

        Its values are computed each time they are read; its dtype and shape need no values.
        """
        return _MadeWhenRead(self)

    def dequantised(self) -> Tensor:
        """Compute the rounded weight, `[out, in]`."""
        device = next(self.parameters()).device
        return self._product(torch.eye(self.in_features, dtype=self._dtype, device=device)).t().to(self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the layer without the bias, which it shares with the original layer."""
        return sum(weight.nbytes for name, weight in self.named_parameters() if name != "bias")

    def forward(self, states: Tensor) -> Tensor:
        """Apply the layer, `[..., in]` to `[..., out]`."""
        product = self._product(states)
        if product.dtype != states.dtype:
            product = product.to(states.dtype)
        return product if self.bias is None else product + self.bias

    def scaled(self, states: Tensor) -> Tensor:
        """Return the inputs, `[..., in]`, multiplied by the factors, in their dtype."""
        return (states * self.factors).to(states.dtype)

    @abstractmethod
    def _product(self, states: Tensor) -> Tensor:
        """Multiply states, `[..., in]` to `[..., out]`, in the kernel's dtype."""


class _MadeWhenRead(Tensor):
    """The weight of a layer in fewer bits, whose values exist only while an operation reads them."""

    layer: LowBitsLinear

    @staticmethod
    def __new__(cls, layer: LowBitsLinear) -> _MadeWhenRead:
        shape, device = (layer.out_features, layer.in_features), next(layer.parameters()).device
        made: _MadeWhenRead = Tensor._make_wrapper_subclass(cls, shape, dtype=layer._dtype, device=device)
        made.layer = layer
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def read(value: Any) -> Any:
            return value.layer.dequantised() if isinstance(value, _MadeWhenRead) else value

        return func(*tree_map(read, args), **tree_map(read, kwargs or {}))


class EightBitsLinear(LowBitsLinear):
    """A linear layer in 8 bits, symmetric, with a scale for each output. Arguments as in `LowBitsLinear`."""

    def __init__(self, rounded: RoundedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(rounded, bias, dtype)
        self._kernels = kernels_of(rounded.levels.device)
        if not self.takes(rounded.levels):
            raise RuntimeError(f"{rounded.inputs} inputs: ATen's kernel takes multiples of {_ATEN_INPUTS}")
        self.levels = _fixed(rounded.levels)
        self.scales = _fixed(rounded.scales.float() if self._kernels is Kernels.NATIVE else rounded.scales)

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Return whether a kernel takes weights with this number of inputs, `[..., in]`."""
        return weight.shape[-1] % _ATEN_INPUTS == 0 or kernels_of(weight.device) is not Kernels.ATEN

    def _product(self, states: Tensor) -> Tensor:
        if self._kernels is Kernels.NATIVE:
            held = (self.levels, None, self.scales, self.factors)
            return _few_at_a_time(lambda some: native.few_rows(some, *held), states)
        if self._kernels is Kernels.TRITON:
            return _by_triton(states, self.factors, self.levels, self.scales, None)
        product = torch.ops.aten._weight_int8pack_mm
        return _in_rows(lambda rows: product(rows, self.levels, self.scales), self.scaled(states))


class FourBitsLinear(LowBitsLinear):
    """A linear layer in 4 bits, with a scale and a zero for each group of inputs. Arguments as in `LowBitsLinear`."""

    def __init__(self, rounded: RoundedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(rounded, bias, dtype)
        assert rounded.zeros is not None
        self.group_size = rounded.inputs // rounded.scales.shape[1]
        self._kernels = self._fastest(rounded)
        if self._kernels is Kernels.TRITON:
            self.levels, self.scales, self.zeros = map(_fixed, (rounded.levels, rounded.scales, rounded.zeros))
            return
        if self._kernels is Kernels.NATIVE:
            # Only some rows at a time: copies of a whole head would take more memory than its substitute.
            kept = (rounded.levels, rounded.scales, rounded.zeros)
            parts = zip(*(part.split(_ROWS_AT_ONCE) for part in kept), strict=True)
            self.levels = _fixed(torch.cat([native.in_blocks(*part) for part in parts]))
            return
        self.levels = _fixed(_packed(rounded.levels))
        self.scales_and_zeros = _fixed(torch.stack([rounded.scales, rounded.zeros], -1).transpose(0, 1).contiguous())

    def _fastest(self, rounded: RoundedWeight) -> Kernels:
        kernels = kernels_of(rounded.levels.device)
        aten_takes = self.in_features % _ATEN_INPUTS_IN_FOUR_BITS == 0 == self.out_features % _ATEN_OUTPUTS
        # In 4 bits ATen's kernels are a little faster than those in Triton, but they do not take every size.
        if (kernels is Kernels.NATIVE and self.group_size != native.GROUP_SIZE) or (
            kernels is Kernels.TRITON and aten_takes
        ):
            return Kernels.ATEN
        return kernels

    def _product(self, states: Tensor) -> Tensor:
        if self._kernels is Kernels.NATIVE:
            held = (self.levels, self.factors)
            return _few_at_a_time(lambda some: native.few_rows_in_four_bits(some, *held), states)
        if self._kernels is Kernels.TRITON:
            return _by_triton(states, self.factors, self.levels, self.scales, self.zeros)
        on_cpu = states.device.type == "cpu"
        kernel = torch.ops.aten._weight_int4pack_mm_for_cpu if on_cpu else torch.ops.aten._weight_int4pack_mm
        packed = (self.levels, self.group_size, self.scales_and_zeros)
        return _in_rows(lambda rows: kernel(rows, *packed), self.scaled(states))


class LowBitsExperts(nn.Module):
    """Experts of a mixture in fewer bits, with two products each. A pass reads only the experts of its tokens."""

    def __init__(
        self, up: Iterable[LowBitsLinear], activation: Callable[[Tensor], Tensor], down: Iterable[LowBitsLinear]
    ) -> None:
        super().__init__()
        self.up, self.down = nn.ModuleList(up), nn.ModuleList(down)
        self._activation = activation

    @property
    def nbytes(self) -> int:
        """Bytes of the experts without biases."""
        return sum(linear.nbytes for linear in (*self.up, *self.down) if isinstance(linear, LowBitsLinear))

    def forward(self, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Sum the outputs of each token's experts.

        Args:
            states: `[tokens, hidden]`.
            chosen: numbers of each token's experts, `[tokens, experts of a token]`.
            shares: weights of these experts in the sum, same shape.

        Returns:
            `[tokens, hidden]`.
        """
        total = torch.zeros_like(states)
        for number in chosen.unique().tolist():
            tokens, places = torch.where(chosen == number)
            given = self.down[number](self._activation(self.up[number](states[tokens])))
            total.index_add_(0, tokens, (given * shares[tokens, places, None]).to(total.dtype))
        return total


def _by_triton(states: Tensor, factors: Tensor, levels: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    # Triton is not installed everywhere.
    from selfspec.kernels.triton_products import low_bits_product

    shape = [int(size) for size in states.shape]
    rows = states.reshape(math.prod(shape[:-1]), shape[-1])
    found = low_bits_product(rows, factors, levels, scales, zeros)
    product: Tensor = found.view(*shape[:-1], int(found.shape[-1]))
    return product


def _few_at_a_time(product: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    # Plain numbers, which no program records.
    shape = [int(size) for size in states.shape]
    rows = math.prod(shape[:-1])
    if rows <= native.MOST_ROWS:
        return product(states)
    parts = states.reshape(rows, shape[-1]).split(native.MOST_ROWS)
    return torch.cat([product(some) for some in parts]).view(*shape[:-1], -1)


def _in_rows(product: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """Call one of ATen's kernels, which take and return `[rows, in]` and `[rows, out]`, in bfloat16."""
    shape = [int(size) for size in states.shape]
    found = product(states.reshape(math.prod(shape[:-1]), shape[-1]).to(torch.bfloat16))
    return found.view(*shape[:-1], int(found.shape[-1]))


def _packed(pairs: Tensor) -> Tensor:
    """Return levels of 4 bits, two in a byte, in the layout of the device's kernel."""
    if pairs.device.type != "cpu":
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        return packed
    # Only some rows at a time, whose layout does not depend on other rows: the kernel takes levels of 32 bits.
    some = pairs.split(_ROWS_AT_ONCE)
    levels = (torch.stack([rows >> 4, rows & 15], -1).flatten(1).to(torch.int32) for rows in some)
    return torch.cat([torch.ops.aten._convert_weight_to_int4pack_for_cpu(rows, 1) for rows in levels])


def _fixed(tensor: Tensor) -> nn.Parameter:
    # A parameter, so that recordings treat it as they treat the weights of stock modules.
    return nn.Parameter(tensor, requires_grad=False)
