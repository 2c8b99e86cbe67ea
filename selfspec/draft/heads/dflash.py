"""DFlash: a block of masked tokens that attends in both directions, and to the target's states of the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from selfspec.cache.tree import Tree
from selfspec.device import to_device
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import drafter
from selfspec.draft.heads.folder import assembled
from selfspec.draft.heads.head import Fusion, Head, causal_lm, inside_of
from selfspec.draft.heads.layered import LayersConfig, LayersFromFolder
from selfspec.draft.heads.pairs import PairProposer
from selfspec.draft.rows_view import RowsView
from selfspec.draft.tree_growth import Read, of_levels


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayersConfig):
    """Describes the blocks of a head, read from its folder in either layout."""

    size: int  # tokens of a block, the last committed one included
    mask: int
    first: int  # place in the block that guesses the next token

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> BlockConfig:
        """Read a config.json; raise `ValueError` if a field is missing."""
        own = config.get("dflash_config")
        if own is not None:
            # State i is the output of layer i in transformers: for the last layer, that is after the final norm.
            points = [point + 1 for point in own.get("target_layer_ids") or ()]
            layers, mask = config, own.get("mask_token_id")
        else:
            points = list(config.get("aux_hidden_state_layer_ids") or ())
            layers, mask = config.get("transformer_layer_config") or {}, config.get("mask_token_id")
        size = config.get("block_size")
        numbers = [each for each in (*points, mask, size) if type(each) is int and each >= 0]
        if not points or len(numbers) < len(points) + 2 or numbers[-1] < 2:
            raise ValueError("it lacks target_layer_ids, mask_token_id or block_size")
        *points, mask, size = numbers
        if "sliding_attention" in (layers.get("layer_types") or ()):
            raise ValueError("its layers have sliding windows, which are not read yet")
        return cls(
            layers=layers,
            points=tuple(points),
            end="last" if own is None else "normed",
            size=size,
            mask=mask,
            first=0 if config.get("sample_from_anchor") else 1,
        )


@drafter("dflash", argument=":FOLDER", help="a published DFlash head that was trained for this model")
@dataclass(frozen=True)
class DFlash(LayersFromFolder):
    """Drafts with a DFlash head (2026, arXiv 2602.06036): all tokens of a block in one pass, which is not causal.

    Its layers take keys and values of the text from the target's states, and keep none of drafted tokens.
    """

    _config: BlockConfig = field(init=False, repr=False, compare=False)
    holds = "DFlash head"
    essential = ("fc.weight", "hidden_norm.weight", "norm.weight")

    read_config = BlockConfig.of

    @property
    def block(self) -> int:
        return self._config.size

    @property
    def levels(self) -> int:
        return self._config.size - 1

    @torch.no_grad()
    def head(self, model: PreTrainedModel) -> Head:
        layers = causal_lm(self.layers_config(), None)
        hidden, read = self._shapes["fc.weight"]
        with torch.device("meta"):
            fusion = BlockFusion(read, hidden, inside_of(layers).norm)
        return assembled(model, layers, fusion, self.weights(), self.source, "normed")

    def proposer(self, rows: RowsView, head: Head) -> BlockProposer:
        return BlockProposer(self, rows, head)


class BlockFusion(Fusion):
    """Joins states of several layers of the target, of width `read` together, and norms them as `norm` does."""

    def __init__(self, read: int, hidden: int, norm: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(read, hidden, bias=False)
        made: Any = type(norm)
        self.hidden_norm = made(hidden, eps=getattr(norm, "variance_epsilon", 1e-6))

    def state(self, features: Sequence[Tensor]) -> Tensor:
        joined: Tensor = self.hidden_norm(self.fc(torch.cat(list(features), -1)))
        return joined

    def inputs(self, embedded: Tensor, state: Tensor) -> Tensor:
        return embedded


class BlockProposer(PairProposer):
    """Keeps the keys and values that a DFlash head makes from the target's states; slot p belongs to token p."""

    kept = 0

    def __init__(self, drafter: DFlash, rows: RowsView, head: Head) -> None:
        super().__init__(drafter, rows, head)
        self._config = drafter._config

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return super().propose(rows, budget.within(self._config.size - self._config.first))

    def _reaches(self, number: int) -> bool:
        return super()._reaches(number) or self._cache.seq_lens[number] > 0

    def reader(self, rows: RowsView, tree: Tree) -> Read:
        levels = self.levels_after_text(rows, tree.depth)
        return of_levels(tree, lambda level: levels[:, level : level + 1])

    def levels_after_text(self, rows: RowsView, depth: int) -> Tensor:
        """Read the text and then `depth` unknown tokens in one pass; return their logits, `[rows, depth, vocab]`."""
        self._drop(rows.running)
        self._catch_up(rows, 0)
        config = self._config
        tokens = rows.last_tokens.new_full((len(rows.running), config.size), config.mask)
        tokens[:, :1] = rows.last_tokens
        states = self.head.embed(tokens)
        base = self._base
        # A block sees all committed tokens before it, and all of its own.
        ends = to_device(self._cache.seq_lens, states.device) + config.size
        tables = self._tables(states)
        for number, layer in enumerate(base.layers):
            attention = layer.self_attn
            inside = layer.input_layernorm(states)
            keys, values = self._store(number, inside, tables)
            queries = rotated(heads_of(attention, "q", inside), *tables)
            # In buckets there are slots behind the longest row's end.
            visible = torch.arange(keys.shape[2], device=states.device) < ends[:, None]
            mixed = scaled_dot_product_attention(
                queries, keys, values, visible[:, None, None], scale=attention.scaling, enable_gqa=True
            )
            states = states + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        guesses = base.norm(states[:, config.first : config.first + depth])
        return self.head.spread(self.head.layers.get_output_embeddings()(guesses), self._vocabulary)

    def _write(self, tokens: Tensor, states: Tensor, counts: Sequence[int]) -> None:
        tables = self._tables(states)
        for number in range(len(self._base.layers)):
            self._store(number, states, tables)

    @property
    def _base(self) -> Any:
        return self.head.layers.get_submodule(self.head.adapter.base(self.head.layers))

    def _tables(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions from each cursor on, `[rows or 1, 1, tokens, size]`."""
        cos, sin = self._base.rotary_emb(states, self._cache.cursors.position_ids(states.shape[1]))
        return cos[:, None], sin[:, None]

    def _store(self, number: int, states: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Write keys and values of states behind the cursors; return the layer's keys and values up to their end."""
        attention = self._base.layers[number].self_attn
        keys, values = rotated(heads_of(attention, "k", states), *tables), heads_of(attention, "v", states)
        with self._cache.reading(states.shape[1]):
            seen: tuple[Tensor, Tensor] = self._cache.update(keys, values, number)
        return seen


def heads_of(attention: Any, part: str, states: Tensor) -> Tensor:
    """Project states to queries, keys or values, `[rows, heads, tokens, size]`, with the layer's norm if it has one."""
    made = getattr(attention, f"{part}_proj")(states).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{part}_norm", None)
    heads: Tensor = made if norm is None else norm(made)
    return heads.transpose(1, 2)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first numbers of each head by its position, as many as there are rotary angles."""
    turned, rest = heads.split([cos.shape[-1], heads.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)
