"""Medusa heads: each guesses one further token from the target's last state, without reading the tokens before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import OwnBytes, drafter
from selfspec.draft.heads.folder import FromFolder, linear_layers
from selfspec.draft.heads.growing_head import KeepingProposer, remembered, share_of
from selfspec.draft.heads.head import check_for_head, weight_bytes
from selfspec.draft.rows_view import RowsView
from selfspec.draft.tree_growth import Read
from selfspec.errors import HeadError
from selfspec.model.features import Point
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.model.layer_path import WeightCopy
from selfspec.model.substitutes import Substitutes
from selfspec.runtime.runtime import with_kernels


@drafter(
    "medusa",
    argument=":FOLDER",
    help="published Medusa heads that were trained for this model",
)
@dataclass(frozen=True)
class Medusa(FromFolder):
    """Drafts with Medusa heads (Cai et al., 2024, arXiv 2401.10774): a draft is as deep as there are heads."""

    runs = "model"
    holds = "Medusa heads"
    essential = ("0.0.linear.weight",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for number in range(_count(self._shapes)):
            last = _blocks(self._shapes, number)
            needed = [f"{number}.{block}.linear.{part}" for block in range(last) for part in ("weight", "bias")]
            lacks = [name for name in [*needed, f"{number}.{last}.weight"] if name not in self._shapes]
            if lacks:
                raise HeadError(f"{self.source} lacks the weight {lacks[0]}; copy it from the original again")

    @staticmethod
    def common_name(name: str) -> str:
        return name.removeprefix("medusa_head.")

    def features(self, depth: int) -> tuple[Point, ...]:
        return ("normed",)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        check_for_head(model, "Medusa heads", self.weight_format)
        vocabulary = vocabulary_size(model)
        hidden = weight_of(model.get_output_embeddings()).shape[1]
        for name, shape in self._shapes.items():
            wanted = hidden if name.endswith("linear.weight") else vocabulary
            if len(shape) == 2 and shape != (wanted, hidden):
                raise HeadError(
                    f"{self.source} was trained for another model: its weight {name} is {list(shape)}, and this model "
                    f"needs {[wanted, hidden]}"
                )

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return share_of(self.own_bytes(model).weights // _count(self._shapes), model, adapter)

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        return OwnBytes(weight_bytes(self._shapes, model.dtype.itemsize, self.weight_format))

    def begin(self, rows: RowsView) -> MedusaProposer:
        return MedusaProposer(rows.size, remembered(rows, self, self._heads))

    def _heads(self, model: PreTrainedModel) -> MedusaHeads:
        weights = {name: weight.to(model.device, model.dtype) for name, weight in self.weights().items()}
        layers = linear_layers(weights)
        if self.weight_format is not None:
            layers = Substitutes().within(layers, "heads", WeightCopy(self.weight_format))
        return MedusaHeads(layers, [_blocks(weights, number) for number in range(_count(weights))])


@dataclass(frozen=True, eq=False)
class MedusaHeads:
    """Holds the linear layers of Medusa heads by published name, and each head's number of residual `blocks`."""

    layers: nn.Module
    blocks: Sequence[int]

    def logits(self, states: Tensor, number: int) -> Tensor:
        """Return the logits of head `number`, `[..., vocab]`, from states, `[..., hidden]`."""
        for block in range(self.blocks[number]):
            states = states + silu(self.layers.get_submodule(f"{number}.{block}.linear")(states))
        logits: Tensor = self.layers.get_submodule(f"{number}.{self.blocks[number]}")(states)
        return logits


class MedusaProposer(KeepingProposer):
    """Grows drafts with Medusa heads, one for each level, all from the row's last state."""

    def __init__(self, rows: int, heads: MedusaHeads) -> None:
        super().__init__(rows)
        self._heads = replace(heads, layers=with_kernels(heads.layers))

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._heads.layers.parameters())

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return super().propose(rows, budget.within(len(self._heads.blocks)))

    def reader(self, rows: RowsView, tree: Tree) -> Read:
        states = self.stacked(rows)[:, None]

        def read(tokens: Tensor, first: int) -> Tensor:
            level = 0 if first < 0 else tree.depths[first]
            return self._heads.logits(states, level).expand(-1, tokens.shape[1], -1)

        return read


def _count(weights: Mapping[str, object]) -> int:
    return 1 + max(int(name.split(".")[0]) for name in weights if name.split(".")[0].isdigit())


def _blocks(weights: Mapping[str, object], number: int) -> int:
    return sum(name.startswith(f"{number}.") and name.endswith(".linear.weight") for name in weights)
