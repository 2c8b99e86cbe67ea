"""Hydra heads: like Medusa's, but each reads the tokens that the heads before it drafted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.tree import Tree
from selfspec.device import to_device
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import OwnBytes, drafter
from selfspec.draft.heads.folder import FromFolder, assembled, linear_layers
from selfspec.draft.heads.head import Fusion, Head, causal_lm, check_for_head, one_layer_config, weight_bytes
from selfspec.draft.heads.pairs import HeadDrafter, PairProposer
from selfspec.draft.rows_view import RowsView
from selfspec.draft.tree_growth import Read
from selfspec.model.identity import vocabulary_size
from selfspec.model.sizes import bytes_read, cache_bytes_of_token

# The published spelling.
_PREFIX = "prefix_embeding_layer."


@drafter("hydra", argument=":FOLDER", help="published Hydra heads that were trained for this model")
@dataclass(frozen=True)
class Hydra(FromFolder, HeadDrafter):
    """Drafts with Hydra heads that have a prefix layer (Ankner et al., 2024, arXiv 2402.05109), one for each level."""

    holds = "Hydra heads with a prefix layer"
    essential = ("hydra_mlp.0.1.linear.weight", f"{_PREFIX}norm.weight")

    @staticmethod
    def needed(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        return [f"hydra_lm_head.{number}.1.weight" for number in range(_count(shapes))]

    @staticmethod
    def common_name(name: str) -> str:
        return name.removeprefix("hydra_head.")

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        check_for_head(model, "Hydra heads", self.weight_format)
        hidden, vocabulary = model.config.get_text_config(decoder=True).hidden_size, vocabulary_size(model)
        norm, head = self._shapes[f"{_PREFIX}norm.weight"], self._shapes["hydra_lm_head.0.1.weight"]
        if norm != (hidden,) or head != (vocabulary, hidden):
            raise self.foreign(f"its heads are {list(head)}, and this model needs {[vocabulary, hidden]}")

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return self.own_bytes(model).weights // _count(self._shapes) / bytes_read(model, adapter)

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        read = {name: shape for name, shape in self._shapes.items() if name != f"{_PREFIX}embed_tokens.weight"}
        size = weight_bytes(read, model, self.weight_format)
        return OwnBytes(size, cache_bytes_of_token(one_layer_config(model), model.dtype))

    @torch.no_grad()
    def head(self, model: PreTrainedModel) -> Head:
        layers, weights = causal_lm(one_layer_config(model), None), self.weights()
        # The guesses of the prefix layer itself are not used, and its embeddings are the model's.
        prefix = {name.removeprefix(_PREFIX): each for name, each in weights.items() if name.startswith(_PREFIX)}
        prefix |= {"lm_head.weight": torch.zeros(1, layers.config.hidden_size)}
        prefix.pop("embed_tokens.weight", None)
        own = {name: each for name, each in weights.items() if not name.startswith(_PREFIX)}
        fusion = HydraFusion(own)
        # Its weights are in place already.
        prefix |= dict(fusion.named_parameters())
        return assembled(model, layers, fusion, prefix, self.source, "normed")

    def proposer(self, rows: RowsView, head: Head) -> HydraProposer:
        return HydraProposer(self, rows, head)


class HydraFusion(Fusion):
    """Computes the guesses of Hydra heads from weights by published name; their prefix layer reads states alone."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        layers = linear_layers(weights)
        self.heads, self.count, self._names = layers, _count(weights), [name for name, _ in layers.named_children()]

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
            place = f"hydra_mlp/{head}/{block}"
            # A head that is not grounded reads the prefix alone.
            linear: Any = self.heads.get_submodule(f"{place}/linear")
            states = residual = states[..., : linear.in_features]
            if f"{place}/res_connection" in self._names:
                residual = self.heads.get_submodule(f"{place}/res_connection")(states)
            states = residual + silu(linear(states))
        logits: Tensor = self.heads.get_submodule(f"hydra_lm_head/{head}/1")(states)
        return logits


class HydraProposer(PairProposer):
    """Grows drafts with Hydra heads, one for each level, from the prefix state and the path before it."""

    @property
    def _heads(self) -> HydraFusion:
        assert isinstance(self.head.fusion, HydraFusion)
        return self.head.fusion

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return super().propose(rows, budget.within(self._heads.count))

    def reader(self, rows: RowsView, tree: Tree) -> Read:
        _, prefix = self._after_committed(rows)
        self._states, fusion = prefix, self._heads
        # The last committed token, and the nodes that are read.
        embedded = self.head.embed(rows.last_tokens)

        def read(tokens: Tensor, first: int) -> Tensor:
            nonlocal embedded
            if first < 0:
                return fusion.logits(prefix, embedded[:, None])
            embedded = torch.cat([embedded, self.head.embed(tokens)], 1)
            paths = [[-1, *tree.paths[node]] for node in range(first, first + tokens.shape[1])]
            return fusion.logits(prefix, embedded[:, to_device(paths, embedded.device) + 1])

        return read


def _count(names: Iterable[str]) -> int:
    return 1 + max(int(name.split(".")[1]) for name in names if name.startswith("hydra_mlp."))


def _blocks(names: Iterable[str], head: int) -> list[int]:
    """Return the numbers of a head's residual blocks; the numbers between them belong to modules of training alone."""
    found = (re.fullmatch(rf"hydra_mlp/{head}/(\d+)/linear", name) for name in names)
    return sorted(int(each[1]) for each in found if each)
