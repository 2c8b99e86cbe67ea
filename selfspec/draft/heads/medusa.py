"""Medusa heads: each guesses one further token from the target's last state, without reading the tokens before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import drafter
from selfspec.draft.heads.folder import FromFolder, linear_layers
from selfspec.draft.heads.head import check_for_head
from selfspec.draft.rows_view import RowsView, made_once
from selfspec.draft.tree_growth import KeepingProposer, Read, of_levels
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.model.sizes import bytes_read
from selfspec.runtime.runtime import with_kernels


@drafter("medusa", argument=":FOLDER", help="published Medusa heads that were trained for this model")
@dataclass(frozen=True)
class Medusa(FromFolder):
    """Drafts with Medusa heads (Cai et al., 2024, arXiv 2401.10774): a draft is as deep as there are heads."""

    holds = "Medusa heads"
    essential = ("0.0.linear.weight",)

    @staticmethod
    def needed(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        found = []
        for number in range(_count(shapes)):
            last = _blocks(shapes, number)
            found += [f"{number}.{block}.linear.{part}" for block in range(last) for part in ("weight", "bias")]
            found.append(f"{number}.{last}.weight")
        return found

    @staticmethod
    def common_name(name: str) -> str:
        return name.removeprefix("medusa_head.")

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        check_for_head(model, "Medusa heads", self.weight_format)
        vocabulary = vocabulary_size(model)
        hidden = weight_of(model.get_output_embeddings()).shape[1]
        for name, shape in self._shapes.items():
            wanted = hidden if name.endswith("linear.weight") else vocabulary
            if len(shape) == 2 and shape != (wanted, hidden):
                raise self.foreign(f"its weight {name} is {list(shape)}, and this model needs {[wanted, hidden]}")

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return self.own_bytes(model).weights // _count(self._shapes) / bytes_read(model, adapter)

    def begin(self, rows: RowsView) -> MedusaProposer:
        blocks = [_blocks(self._shapes, number) for number in range(_count(self._shapes))]
        return MedusaProposer(rows.size, made_once(rows, self, self._layers), blocks)

    def _layers(self, model: PreTrainedModel) -> nn.Module:
        weights = {name: weight.to(model.device, model.dtype) for name, weight in self.weights().items()}
        return linear_layers(weights, self.weight_format)


class MedusaProposer(KeepingProposer):
    """Grows drafts with Medusa heads, one for each level, each of so many residual `blocks`, from the last state."""

    def __init__(self, rows: int, layers: nn.Module, blocks: Sequence[int]) -> None:
        self._layers, self._blocks = with_kernels(layers), blocks
        super().__init__(rows, [self._layers])

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return super().propose(rows, budget.within(len(self._blocks)))

    def reader(self, rows: RowsView, tree: Tree) -> Read:
        return of_levels(tree, partial(self.logits, self.stacked(rows)[:, None]))

    def logits(self, states: Tensor, number: int) -> Tensor:
        """Return the logits of head `number`, `[..., vocab]`, from states, `[..., hidden]`."""
        for block in range(self._blocks[number]):
            states = states + silu(self._layers.get_submodule(f"{number}/{block}/linear")(states))
        logits: Tensor = self._layers.get_submodule(f"{number}/{self._blocks[number]}")(states)
        return logits


def _count(weights: Mapping[str, object]) -> int:
    return 1 + max(int(name.split(".")[0]) for name in weights if name.split(".")[0].isdigit())


def _blocks(weights: Mapping[str, object], number: int) -> int:
    return sum(name.startswith(f"{number}.") and name.endswith(".linear.weight") for name in weights)
