"""Hydra heads: like Medusa's, but each reads the tokens that the heads before it drafted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.tree import Tree
from selfspec.device import to_device
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import OwnBytes, drafter
from selfspec.draft.heads.folder import FromFolder, fill, linear_layers, output_layer
from selfspec.draft.heads.growing_head import HeadDrafter, HeadProposer, share_of
from selfspec.draft.heads.head import Fusion, Head, causal_lm, check_for_head, one_layer_config, weight_bytes
from selfspec.draft.heads.pairs import PairState
from selfspec.draft.rows_view import RowsView
from selfspec.draft.tree_growth import Read
from selfspec.errors import HeadError
from selfspec.model.features import Point
from selfspec.model.identity import vocabulary_size
from selfspec.model.registry import find_adapter
from selfspec.model.sizes import cache_bytes_of_token

# The published spelling.
_PREFIX = "prefix_embeding_layer."


@drafter(
    "hydra",
    argument=":FOLDER",
    help="published Hydra heads that were trained for this model",
)
@dataclass(frozen=True)
class Hydra(FromFolder, HeadDrafter):
    """Drafts with Hydra heads that have a prefix layer (Ankner et al., 2024, arXiv 2402.05109), one for each level."""

    holds = "Hydra heads with a prefix layer"
    essential = ("hydra_mlp.0.1.linear.weight", f"{_PREFIX}norm.weight")

    def __post_init__(self) -> None:
        super().__post_init__()
        lacks = [f"hydra_lm_head.{number}.1.weight" for number in range(_count(self._shapes))]
        lacks = [name for name in lacks if name not in self._shapes]
        if lacks:
            raise HeadError(f"{self.source} lacks the weight {lacks[0]}; copy it from the original again")

    @staticmethod
    def common_name(name: str) -> str:
        return name.removeprefix("hydra_head.")

    def points(self, depth: int) -> tuple[Point, ...]:
        return ("normed",)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        check_for_head(model, "Hydra heads", self.weight_format)
        hidden, vocabulary = model.config.get_text_config(decoder=True).hidden_size, vocabulary_size(model)
        norm, head = self._shapes[f"{_PREFIX}norm.weight"], self._shapes["hydra_lm_head.0.1.weight"]
        if norm != (hidden,) or head != (vocabulary, hidden):
            raise HeadError(
                f"{self.source} was trained for another model: its heads are {list(head)}, and this model needs "
                f"{[vocabulary, hidden]}"
            )

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return share_of(self.own_bytes(model).weights // _count(self._shapes), model, adapter)

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        read = {name: shape for name, shape in self._shapes.items() if name != f"{_PREFIX}embed_tokens.weight"}
        size = weight_bytes(read, model.dtype.itemsize, self.weight_format)
        return OwnBytes(size, cache_bytes_of_token(_layer_config(model), model.dtype))

    @torch.no_grad()
    def head(self, model: PreTrainedModel) -> Head:
        weights = self.weights()
        layers = causal_lm(_layer_config(model), None)
        adapter = find_adapter(layers)
        inside: Any = layers.get_submodule(adapter.base(layers))
        inside.embed_tokens = nn.Identity()
        # The guesses of the prefix layer itself are not used.
        width = layers.config.hidden_size
        unused = torch.zeros(1, width, device=model.device, dtype=model.dtype)
        layers.lm_head = output_layer({"weight": unused}, "", model, self.source)
        prefix = {name.removeprefix(_PREFIX): each for name, each in weights.items() if name.startswith(_PREFIX)}
        fill(inside, prefix, self.source)
        inside.to(device=model.device, dtype=model.dtype)
        own = {name: each for name, each in weights.items() if not name.startswith(_PREFIX)}
        fusion = HydraFusion({name: each.to(model.device, model.dtype) for name, each in own.items()})
        embed = model.get_input_embeddings()
        layers.set_input_embeddings(embed)
        return Head(fusion, layers, adapter, "normed", embed, None)

    def proposer(self, state: PairState) -> HydraProposer:
        return HydraProposer(state)


class HydraFusion(Fusion):
    """Computes the guesses of Hydra heads from weights by published name; their prefix layer reads states alone."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.heads = linear_layers(weights)
        self.count = _count(weights)
        self._names = list(weights)

    def inputs(self, embedded: Tensor, state: Tensor) -> Tensor:
        return state.clone()

    def logits(self, prefix: Tensor, embedded: Tensor) -> Tensor:
        """Return the logits of the next level's head, `[rows, nodes, vocab]`.

        `prefix` is the state of the prefix layer, `[rows, 1, hidden]`; `embedded` has the last committed token and the
        path to each node, `[rows, nodes, tokens, hidden]`.
        """
        rows, nodes, tokens, hidden = embedded.shape
        head = tokens - 1
        states = torch.cat([prefix.expand(-1, nodes, -1), embedded.reshape(rows, nodes, tokens * hidden)], -1)
        for block in _blocks(self._names, head):
            place = f"hydra_mlp.{head}.{block}"
            # A head that is not grounded reads the prefix alone.
            linear: Any = self.heads.get_submodule(f"{place}.linear")
            states = states[..., : linear.in_features]
            residual = states
            if f"{place}.res_connection.weight" in self._names:
                residual = self.heads.get_submodule(f"{place}.res_connection")(states)
            states = residual + silu(linear(states))
        logits: Tensor = self.heads.get_submodule(f"hydra_lm_head.{head}.1")(states)
        return logits


class HydraProposer(HeadProposer):
    """Grows drafts with Hydra heads, one for each level, from the prefix state and the path before it."""

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        fusion = self._state.head.fusion
        assert isinstance(fusion, HydraFusion)
        return super().propose(rows, budget.within(fusion.count))

    def reader(self, rows: RowsView, tree: Tree) -> Read:
        fusion = self._state.head.fusion
        assert isinstance(fusion, HydraFusion)
        prefix = self._state.state_after_text(rows)
        # The last committed token, and the nodes that are read.
        embedded = self._state.head.embed(rows.last_tokens)

        def read(tokens: Tensor, first: int) -> Tensor:
            nonlocal embedded
            if first < 0:
                return fusion.logits(prefix, embedded[:, None])
            embedded = torch.cat([embedded, self._state.head.embed(tokens)], 1)
            paths = [[-1, *tree.paths[node]] for node in range(first, first + tokens.shape[1])]
            return fusion.logits(prefix, embedded[:, to_device(paths, embedded.device) + 1])

        return read


def _count(names: Iterable[str]) -> int:
    return 1 + max(int(name.split(".")[1]) for name in names if name.startswith("hydra_mlp."))


def _blocks(names: Iterable[str], head: int) -> list[int]:
    """Return the numbers of a head's residual blocks; the numbers between them belong to modules of training alone."""
    found = (re.fullmatch(rf"hydra_mlp\.{head}\.(\d+)\.linear\.weight", name) for name in names)
    return sorted(int(each[1]) for each in found if each)


def _layer_config(model: PreTrainedModel) -> PreTrainedConfig:
    config: Any = one_layer_config(model)
    config.layer_types = None if getattr(config, "layer_types", None) is None else config.layer_types[:1]
    found: PreTrainedConfig = config
    return found
