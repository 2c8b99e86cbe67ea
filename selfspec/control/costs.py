"""What the parts of a round cost, in steps of plain decoding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from selfspec.arguments import check_kind
from selfspec.errors import DraftConfigError
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.substitutes import substituted_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfspec.model.adapter import Adapter
    from selfspec.model.early_head import DraftHead


# Every round takes some time; where differences of measured times say otherwise, it is noise.
_LEAST_ROUND = 0.01


@runtime_checkable
class CostsByRows(Protocol):
    """Says what the parts of a round cost in a batch of any size."""

    def in_batch(self, rows: int) -> Costs:
        """The costs of rounds over so many rows.

        Args:
            rows: of the batch, at least 1.
        """


@dataclass(frozen=True)
class Costs:
    """The terms of the speed-up formula, after Leviathan et al. (2023). The unit is one step of plain decoding.

    Attributes:
        draft: c, a draft step, head included; 0 for a draft that runs no model.
        verify: V(1), a target pass over a single token; more than 1 where drafting costs it something extra.
        widening: what every further token of the block adds to V.
        overhead: o, all else in a round that drafts.
        out_of_step: how long a pass takes over rows of a batch that stand at different places, in passes over rows that
            stand alike. 1.2 was measured on a model of 2M parameters; the larger the model, the less it is.
        rows: of the batch that all this is about.
        each_row: what a further row adds to a pass over one token of each, where it is more than a further token of a
            block does by `widening`: kernels for a few rows in all do not help batches.

    Raises:
        DraftConfigError: a number is not finite, or below what it can be.
    """

    draft: float
    verify: float = 1.0
    widening: float = 0.0
    overhead: float = 0.0
    out_of_step: float = 1.2
    rows: int = 1
    each_row: float = 0.0

    def __post_init__(self) -> None:
        numbers = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
                raise DraftConfigError(f"costs must be finite numbers, got {name}={number!r}")
            least = 1 if name in ("rows", "out_of_step") else 0
            # What is left of a round beside its passes is measured as a difference, and may be negative.
            if name != "overhead" and number < least:
                raise DraftConfigError(f"of costs {name} is at least {least}, got {number!r}")
        if self.verify == 0:
            raise DraftConfigError(
                "a target pass costs something, got verify=0; 1.0 is what a step of plain decoding is"
            )

    @classmethod
    def assumed(cls, draft: float, device: torch.device) -> Costs:
        """Where only c is known: what a target pass and all else cost on the machines that were looked at.

        Args:
            draft: c.
            device: that passes run on.
        """
        # Two CPUs were looked at, and no GPU.
        each_row = 0.08 if device.type == "cpu" else 0.0
        return cls(draft, verify=1.1, widening=0.03, overhead=0.05, each_row=each_row)

    def in_batch(self, rows: int) -> Costs:
        """The same for another number of rows, on the footing that a pass takes longer in proportion to its tokens.

        For more rows than these that is by what a further row adds, for fewer by what a further token does.

        Each further token of a block is one more in every row, so blocks widen a pass the more the larger the batch.

        Args:
            rows: of the batch, at least 1.
        """
        each = self.widening / self.rows
        if rows > self.rows:
            each = max(each, self.each_row)
        step = max(1 + each * (rows - self.rows), each * rows)
        return replace(
            self,
            widening=each * rows / step,
            overhead=self.overhead / step,
            rows=rows,
            each_row=self.each_row / step,
        )

    def of_round(self, steps: int, drafted: int) -> float:
        """The cost of a round.

        Args:
            steps: draft steps it takes.
            drafted: tokens its target pass verifies besides the last committed one.
        """
        return max(steps * self.draft + self.verify + drafted * self.widening + self.overhead, _LEAST_ROUND)


@dataclass(frozen=True)
class BatchCosts:
    """The costs of rounds as they were measured in batches of different sizes.

    What a further row costs follows no line: products of a few rows run at the speed of memory, those of many rows at
    that of arithmetic, and kernels change in between.

    Attributes:
        measured: one for each number of rows, the smallest first.

    Raises:
        DraftConfigError: there are none, two are of one size, or they are in another order.
    """

    measured: tuple[Costs, ...]

    def __post_init__(self) -> None:
        for costs in self.measured:
            check_kind("each of the measured costs", costs, Costs, "write BatchCosts((Costs(draft=0.3),))")
        sizes = [costs.rows for costs in self.measured]
        if not sizes or sizes != sorted(set(sizes)):
            raise DraftConfigError(f"costs are measured once for each number of rows, in order, got {sizes}")

    def in_batch(self, rows: int) -> Costs:
        """The costs of rounds over so many rows: between two sizes that were measured on a line over their logarithms.

        Outside of these by the nearest one, as `Costs.in_batch` takes it.

        Args:
            rows: of the batch, at least 1.
        """
        smaller = [costs for costs in self.measured if costs.rows <= rows]
        larger = [costs for costs in self.measured if costs.rows >= rows]
        if not smaller or not larger or smaller[-1] is larger[0]:
            return (smaller[-1:] or larger)[0].in_batch(rows)
        below, above = smaller[-1], larger[0]
        share = math.log(rows / below.rows) / math.log(above.rows / below.rows)

        def between(one: float, other: float) -> float:
            return one + (other - one) * share

        return Costs(
            draft=between(below.draft, above.draft),
            verify=between(below.verify, above.verify),
            widening=between(below.widening, above.widening),
            overhead=between(below.overhead, above.overhead),
            # A single row is always in step.
            out_of_step=above.out_of_step if below.rows == 1 else between(below.out_of_step, above.out_of_step),
            rows=rows,
            each_row=between(below.each_row, above.each_row),
        )


def share_read(model: PreTrainedModel, adapter: Adapter, path: LayerPath, head: DraftHead | None = None) -> float:
    """The draft cost ratio c by the weights that a step reads: those of the path by those of the full network.

    Embeddings count as nothing, since a step reads single rows of them; the language-model head counts in both.

    Args:
        model: the stock model.
        adapter: where its layers are.
        path: what a draft step runs.
        head: what reads its last states; None: the model's own norm and head.
    """
    layers = adapter.decoder_layers(model)
    output = model.get_output_embeddings()
    looked_up = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    elsewhere = _ids([*layers, *looked_up, output])
    rest = sum(weight.nbytes for weight in model.parameters() if id(weight) not in elsewhere)
    rows = _bytes(output.parameters())
    full = rest + rows + sum(_bytes(layer.parameters()) for layer in layers)
    read = rest + sum(_layer_bytes(layer, index, adapter, path) for index, layer in enumerate(layers))
    if head is None or head.tokens is None:
        read += int(rows * _bits_of(path, output.weight)) if path.head_substituted else rows
    else:
        read += rows * len(head.tokens) // output.weight.shape[0]
    if head is not None and head.adapter is not None:
        read += sum(weight.numel() for weight in head.adapter.parameters()) * output.weight.element_size()
    return float(read / full)


def _layer_bytes(layer: nn.Module, index: int, adapter: Adapter, path: LayerPath) -> int:
    sublayers = [Sublayer(index, part) for part in Part]
    if not any(map(path.runs, sublayers)):
        return 0
    read = _bytes(layer.parameters())
    for sublayer in sublayers:
        modules = [layer.get_submodule(name) for name in adapter.modules_of(layer, sublayer.part)]
        if not path.runs(sublayer):
            read -= sum(_bytes(module.parameters()) for module in modules)
        elif path.precision is not None and sublayer in path.substituted:
            weights = [weight for module in modules for weight in substituted_weights(module, path.precision)]
            read -= sum(int(weight.nbytes * (1 - _bits_of(path, weight))) for weight in weights)
    return read


def _bits_of(path: LayerPath, weight: Tensor) -> float:
    """The bits of a substitute's weight by those of the weight itself."""
    assert path.precision is not None
    return path.precision.bits / (8 * weight.element_size())


def _bytes(weights: Iterable[Tensor]) -> int:
    return sum(weight.nbytes for weight in weights)


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(weight) for module in modules for weight in module.parameters()}
