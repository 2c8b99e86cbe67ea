"""Packed weights, and layers that multiply by them; they take plain tensors, so that passes can be recorded."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from selfspec.errors import UnsupportedModelError
from selfspec.kernels import native
from selfspec.kernels.crossover import crossover

PANEL_ON_CPU = 1 << 20
"""Weights in bfloat16 that are joined at once where rows are many: they stay in the cache for the product."""
# The most bytes that a thread keeps for what it joins next.
_MOST_KEPT = 1 << 26


class UnsupportedWeightError(RuntimeError):
    """Says why an exact format does not keep a weight."""


@dataclass(frozen=True)
class Packed:
    """Holds a weight, `[..., out, in]`, as named parts, alike on every machine; those of experts are stacked."""

    shape: torch.Size
    parts: Mapping[str, Tensor]

    def __getitem__(self, part: str) -> Tensor:
        return self.parts[part]

    def of_expert(self, number: int) -> Packed:
        """Return a view of the weight of one expert."""
        return Packed(self.shape[1:], {name: part[number] for name, part in self.parts.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())


class PackedLinear(nn.Module, ABC):
    """Multiplies by a packed weight, `[out, in]`; subclasses keep its parts as parameters, laid out for a kernel.

    The bias, `[out]`, is not copied. Making the layer raises `RuntimeError` if no kernel takes its size.
    """

    bias: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        (self.out_features, self.in_features), self.dtype = packed.shape, dtype
        self.shape = packed.shape
        self.register_parameter("bias", None if bias is None else fixed(bias.detach()))

    @abstractmethod
    def product(self, states: Tensor) -> Tensor:
        """Multiply states, `[..., in]` to `[..., out]`, in the kernel's dtype."""

    def join(self) -> Tensor:
        """Compute the dense weight, `[out, in]`, in the dtype of the layer."""
        device = next(self.parameters()).device
        return self.product(torch.eye(self.in_features, dtype=self.dtype, device=device)).t().to(self.dtype)

    def rows_of(self, ids: Tensor) -> Tensor:
        """Return rows of the dense weight, `[..., in]`, by their numbers, `[...]`."""
        return self.join()[ids]

    @property
    def weight(self) -> Tensor:
        """The dense weight, `[out, in]`, for modules that read it; its values are computed at each read."""
        return PackedWeight(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the layer without the bias, which it shares with the original layer."""
        return sum(weight.nbytes for name, weight in self.named_parameters() if name != "bias")

    def forward(self, states: Tensor) -> Tensor:
        """Apply the layer, `[..., in]` to `[..., out]`."""
        product = self.product(states)
        if product.dtype != states.dtype:
            product = product.to(states.dtype)
        return product if self.bias is None else product + self.bias


class _Room(threading.local):
    """Memory of a thread for the weight that it multiplies by; new memory comes from the system a page at a time."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8)

    def of(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a weight, which the next call returns again."""
        size = rows * columns * dtype.itemsize
        if size > _MOST_KEPT:
            return torch.empty(rows, columns, dtype=dtype)
        if size > len(self._kept):
            self._kept = torch.empty(size, dtype=torch.uint8)
        return self._kept[:size].view(dtype).view(rows, columns)


_room = cache(_Room)


class KernelLinear(PackedLinear):
    """Multiplies few rows by a kernel for the packed weight, and many by the dense weight, in panels.

    With few rows it gives the bits of `selfspec.kernels.native.few_rows` by the dense weight in float32.
    """

    @property
    @abstractmethod
    def operands(self) -> native.Operands:
        """Operands of the kernel."""

    @abstractmethod
    def decoded(self, numbers: Tensor) -> Tensor:
        """Compute rows of the dense weight, `[numbers, in]`, without a kernel."""

    @property
    def is_native(self) -> bool:
        """Return whether kernels run where the weight is."""
        return self.operands.weight.device.type == "cpu" and native.available()

    def product(self, states: Tensor) -> Tensor:
        rows = states.numel() // self.in_features
        is_float = self.dtype != torch.float64
        most = crossover().rows(self.dtype, self.in_features) if self.is_native and is_float else 0
        # The kernel keeps nothing for gradients.
        trains = states.requires_grad and torch.is_grad_enabled()
        if rows > most or trains or torch.is_autocast_enabled("cpu"):
            return self._of_many(states)
        return native.few_rows_packed(states, self.operands)

    def _of_many(self, states: Tensor) -> Tensor:
        # Gradients, graphs and autocast may read the weight later.
        here = type(states) is Tensor and not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
        joined = self._joined if here and not torch.is_grad_enabled() else self.rows_of
        if not self.is_native or self.dtype not in (torch.float32, torch.bfloat16):
            return functional.linear(states, self.join())
        # In float32 torch gives other bits for fewer outputs.
        size = PANEL_ON_CPU if self.dtype == torch.bfloat16 else self.out_features * self.in_features
        ids = torch.arange(self.out_features)
        products = [functional.linear(states, joined(ids[some])) for some in some_rows(self.weight, size)]
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    def _joined(self, ids: Tensor) -> Tensor:
        """Return rows of the dense weight, by their numbers, in memory that the next call writes to."""
        weight = _room().of(len(ids), self.in_features, self.dtype)
        native.read_rows_to(weight, ids, self.operands)
        return weight

    def join(self) -> Tensor:
        return self.rows_of(torch.arange(self.out_features, device=self.operands.weight.device))

    def rows_of(self, ids: Tensor) -> Tensor:
        if not self.is_native:
            return self.decoded(ids.flatten()).to(self.dtype).reshape(*ids.shape, self.in_features).contiguous()
        made = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        found = native.rows_packed(ids, self.operands, made)
        # As one operation also where a graph is made.
        return found if made == self.dtype else torch.ops.aten._to_copy(found, dtype=self.dtype)


class PackedStack(nn.Module):
    """Holds the packed weight of all experts of a mixture, `[experts, out, in]`."""

    def __init__(self, packed: Packed, kind: type[PackedLinear], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.kind, self.dtype = packed.shape, kind, dtype
        for name, part in packed.parts.items():
            self.register_parameter(name, fixed(part))

    def expert(self, number: int, bias: Tensor | None = None) -> PackedLinear:
        """Make the layer of one expert over its part of the weight."""
        packed = Packed(self.shape, {name: part.detach() for name, part in self.named_parameters()})
        return self.kind(packed.of_expert(number), bias, self.dtype)

    def join(self) -> Tensor:
        """Compute the dense weight."""
        return torch.stack([self.expert(number).join() for number in range(self.shape[0])])

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parameters())


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class PackedWeight(Tensor):
    """Stands for the dense weight of a packed layer or stack, whose values exist only while an operation reads them.

    Modules that hold it in place of their weight compute what they did, to the last bit. It cannot be written to.

    Attributes:
        transposed: whether modules hold it as `[..., in, out]`.
        turned: whether this is a view with the last two dimensions of what modules hold exchanged.
    """

    layer: PackedLinear | PackedStack
    transposed: bool
    turned: bool

    @staticmethod
    def __new__(cls, layer: PackedLinear | PackedStack, transposed: bool = False, turned: bool = False) -> PackedWeight:
        like = torch.empty(layer.shape, device="meta")
        if transposed:
            like = torch.empty(like.mT.shape, device="meta")
        if turned:
            like = like.mT
        made: PackedWeight = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=layer.dtype, device=next(layer.parameters()).device
        )
        made.layer, made.transposed, made.turned = layer, transposed, turned
        return made

    @property
    def kind(self) -> type[PackedLinear]:
        """The layer that multiplies by it."""
        return self.layer.kind if isinstance(self.layer, PackedStack) else type(self.layer)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of its parts."""
        return self.layer.nbytes

    def _of(self, layer: PackedLinear | PackedStack) -> PackedWeight:
        return type(self)(layer, self.transposed, self.turned)

    @property
    def data(self) -> Tensor:
        return self._of(self.layer)

    @data.setter
    def data(self, value: Tensor) -> None:
        # Modules do so where they are moved, or change their dtype.
        if not isinstance(value, PackedWeight) or value.layer is not self.layer:
            raise UnsupportedModelError(
                f"packed weights keep their values, dtype ({self.dtype}) and device; load the model with the dtype and "
                "on the device that you want, or without packing its weights"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        # Nothing writes to it.
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.layer, self.transposed, self.turned)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({type(self.layer).__name__}, {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _SAME:
            return args[0]._of(args[0].layer)
        if func is torch.ops.aten.transpose.int and {each % args[0].ndim for each in args[1:]} == _LAST[args[0].ndim]:
            return cls(args[0].layer, args[0].transposed, not args[0].turned)
        of_experts = _BY_EXPERT.get(func)
        if of_experts is not None and any(
            isinstance(each, cls) and isinstance(each.layer, PackedStack) for each in args[:2]
        ):
            found = of_experts(*args, **(kwargs or {}))
            if found is not None:
                return found
        if func is torch.ops.aten.embedding.default and isinstance(args[0], cls):
            ids = args[1]
            # Kernels give NaN for these, and stock embeddings an error, which on other devices would wait for them.
            if (
                type(ids) is Tensor
                and ids.is_cpu
                and ids.numel()
                and not 0 <= int(ids.min()) <= int(ids.max()) < len(args[0])
            ):
                raise IndexError("index out of range in self")
            assert isinstance(args[0].layer, PackedLinear)
            return args[0].layer.rows_of(ids)
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(given, cls):
                raise UnsupportedModelError(
                    "packed weights keep their values; load the model without packing its weights"
                )
        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))


def dense(value: Any) -> Any:
    """Return the values of a packed weight; anything else as it is."""
    if not isinstance(value, PackedWeight):
        return value
    values = value.layer.join()
    # Views go by the strides that a packed weight says it has.
    held = (values.mT if value.transposed else values).contiguous()
    return held.mT if value.turned else held


# The last two dimensions, by the number of all.
_LAST = {2: {0, 1}, 3: {1, 2}}


# Stock experts read their weights by these operations: only those of the experts that tokens are sent to are made.
def _selected(weight: PackedWeight, dim: int, number: int) -> Tensor | None:
    assert isinstance(weight.layer, PackedStack)
    return weight._of(weight.layer.expert(number % weight.shape[0])) if dim == 0 else None


def _indexed(weight: PackedWeight, indices: Sequence[Tensor | None]) -> Tensor | None:
    if len(indices) != 1 or indices[0] is None or indices[0].ndim != 1 or indices[0].dtype == torch.bool:
        return None
    return torch.stack([dense(weight[number]) for number in indices[0].tolist()])


def _grouped(
    states: Tensor, weight: PackedWeight, ends: Tensor | None = None, bias: Tensor | None = None, dtype: Any = None
) -> Tensor | None:
    if states.ndim != 2 or ends is None or bias is not None or dtype not in (None, states.dtype):
        return None
    found, first = states.new_zeros(len(states), weight.shape[-1]), 0
    for number, end in enumerate(ends.tolist()):
        if end > first:
            torch.mm(states[first:end], dense(weight[number]), out=found[first:end])
        first = end
    return found


_BY_EXPERT: dict[Any, Callable[..., Tensor | None]] = {
    torch.ops.aten.select.int: _selected,
    torch.ops.aten.index.Tensor: _indexed,
    torch.ops.aten._grouped_mm.default: _grouped,
}


class PackedExperts(nn.Module):
    """Runs experts of a mixture, two packed products each. A pass reads only the experts of its tokens."""

    def __init__(
        self, up: Iterable[PackedLinear], activation: Callable[[Tensor], Tensor], down: Iterable[PackedLinear]
    ) -> None:
        super().__init__()
        self.up, self.down = nn.ModuleList(up), nn.ModuleList(down)
        self._activation = activation

    @property
    def nbytes(self) -> int:
        """Bytes of the experts without biases."""
        return sum(linear.nbytes for linear in (*self.up, *self.down) if isinstance(linear, PackedLinear))

    def forward(self, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Sum the experts of tokens, `[tokens, hidden]`, by numbers and shares `[tokens, experts of a token]`."""
        total = torch.zeros_like(states)
        for number in chosen.unique().tolist():
            tokens, places = torch.where(chosen == number)
            given = self.down[number](self._activation(self.up[number](states[tokens])))
            total.index_add_(0, tokens, (given * shares[tokens, places, None]).to(total.dtype))
        return total


def some_rows(weight: Tensor, numbers: int) -> Iterator[slice]:
    """Cut the rows of a weight, `[out, in]`, into slices of about as many numbers."""
    step = max(1, numbers // weight.shape[1])
    return (slice(first, first + step) for first in range(0, weight.shape[0], step))


def fixed(tensor: Tensor) -> nn.Parameter:
    """Return a parameter that is not trained: recordings treat it as they treat the weights of stock modules."""
    return nn.Parameter(tensor, requires_grad=False)
