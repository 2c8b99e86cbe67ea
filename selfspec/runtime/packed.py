"""Linear layers packed for oneDNN, in place of their weights: blocks of few rows then cost about what one row does.

Where a processor has AVX-512, torch's own product of four rows takes twice as long as that of one, which kills
speculation; oneDNN's kernel over weights in its own layout does not, and in bfloat16 it is the faster one for a single
row too. Packing takes the place of the plain weights, so memory does not grow, and so it is the one thing here that
changes a model: it is asked for by name, `unpack` undoes it to the bit, and a packed model still works as a model.
The figures are those of benchmarks/few_rows.py.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.arguments import check_module
from selfspec.errors import UnsupportedModelError, UnsupportedOptionError
from selfspec.model.view import has_other_forward

# The layout is chosen for blocks of this many rows; it serves others as well.
_ROWS = 4


class PackedLinear(nn.Linear):
    """A linear layer whose weight is laid out for oneDNN; it is still called `weight`, and is saved as a plain one.

    Moved to another dtype or device it is packed anew, or becomes a plain layer where it cannot be. It cannot be
    trained.
    """

    _needs_gradient: bool

    @classmethod
    def take(cls, linear: nn.Linear) -> None:
        """Turn a plain layer into a packed one; all references to it then see the packed layer."""
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear._needs_gradient = linear.weight.requires_grad
        linear._put(_packed(linear.weight.detach()))

    def give_back(self) -> None:
        """Turn it into a plain layer again."""
        needed = self.__dict__.pop("_needs_gradient")
        self._put(self.weight.to_dense(), needed)
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        """As in `nn.Linear`, `[..., in_features]` to `[..., out_features]`.

        Raises:
            UnsupportedOptionError: gradients are asked for.
        """
        if torch.is_grad_enabled() and input.requires_grad:
            raise UnsupportedOptionError(
                "packed layers cannot be trained; selfspec.runtime.unpack(model) before training"
            )
        product: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
        return product

    def _put(self, weight: Tensor, needs_gradient: bool = False) -> None:
        self._parameters["weight"] = nn.Parameter(weight, requires_grad=needs_gradient)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self.give_back()
        nn.Linear._apply(self, fn, recurse)
        if _can_be_packed(self):
            PackedLinear.take(self)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.detach().to_dense()

    def _load_from_state_dict(self, *args: Any) -> None:
        self.give_back()
        nn.Linear._load_from_state_dict(self, *args)
        PackedLinear.take(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        # torch cannot copy what it has no storage of.
        memo[id(self.weight)] = nn.Parameter(_packed(self.weight.to_dense()), requires_grad=False)
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone


@torch.no_grad()
def pack(model: PreTrainedModel) -> None:
    """Lay the weights of a model's linear layers out for oneDNN, each in place of the plain one.

    Pays on CPUs with AVX-512, in bfloat16 most. Weights that other modules use too, such as a head tied to the
    embeddings, stay unchanged. The model computes the same up to rounding; two layouts round differently.

    Args:
        model: on a CPU, in float32, or bfloat16 where the processor has AVX-512. It is changed; `unpack` undoes that.

    Raises:
        UnsupportedOptionError: this torch has no oneDNN.
        UnsupportedModelError: no layer can be packed, or the model uses weights otherwise than through its layers; it
            is as it was.
    """
    check_module(model)
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        raise UnsupportedOptionError("this torch was built without oneDNN, so weights cannot be packed; leave it out")
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    chosen = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and uses[id(module.weight)] == 1 and _can_be_packed(module)
    }
    if not chosen:
        raise UnsupportedModelError(
            "this model has no linear layer that can be packed: plain ones, on a CPU, in "
            f"{' or '.join(str(dtype).removeprefix('torch.') for dtype in packable_dtypes())}, with weights of their "
            "own; leave it out"
        )
    for module in chosen.values():
        PackedLinear.take(module)
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        unpack(model)
        raise UnsupportedModelError(
            f"{type(model).__name__} uses weights otherwise than through its layers, so they cannot be packed "
            f"({str(error).splitlines()[0]}); leave it out"
        ) from error


@torch.no_grad()
def unpack(model: nn.Module) -> None:
    """Give the packed layers of a model, if it has any, their plain weights back, bit by bit.

    Raises:
        UnsupportedModelError: it is no model.
    """
    check_module(model)
    for layer in packed_layers(model):
        layer.give_back()


def packed_layers(model: nn.Module) -> Iterator[PackedLinear]:
    """Every packed layer of a model, each as often as the model names it."""
    for _, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedLinear):
            yield module


def packable_dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes for which oneDNN has kernels here: bfloat16 is among them on processors with AVX-512."""
    half = (torch.bfloat16,) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ()
    return (torch.float32, *half)


def _can_be_packed(linear: nn.Linear) -> bool:
    weight = linear.weight
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in packable_dtypes()
        and weight.is_contiguous()
        and weight.numel() > 0
        and not has_other_forward(linear)
    )


def _packed(weight: Tensor) -> Tensor:
    laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return laid_out
