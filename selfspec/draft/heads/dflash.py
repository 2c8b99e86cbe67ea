"""DFlash: a block of masked tokens that attends in both directions, and to the target's states of the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.device import to_device
from selfspec.draft.drafter import OwnBytes, drafter
from selfspec.draft.heads.folder import FromFolder, drafted_tokens, fill, output_layer
from selfspec.draft.heads.growing_head import HeadDrafter, LevelProposer, share_of
from selfspec.draft.heads.head import Fusion, Head, bytes_kept, bytes_read, causal_lm, check_for_head, layer_config
from selfspec.draft.heads.pairs import PairState
from selfspec.draft.rows_view import RowsView
from selfspec.errors import HeadError
from selfspec.model.features import Point
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.model.registry import find_adapter
from selfspec.model.sizes import cache_bytes_of_token


@dataclass(frozen=True)
class BlockConfig:
    """Describes the blocks of a head, read from its folder in either layout.

    Attributes:
        points: numbers of the layers whose inputs it reads.
        end: state that it reads where that number is the model's depth, before or after the final norm.
        size: tokens of a block, the last committed one included.
        mask: token in the place of unknown tokens.
        first: place in the block that guesses the next token.
    """

    layers: Mapping[str, Any]
    points: tuple[int, ...]
    end: Literal["last", "normed"]
    size: int
    mask: int
    first: int

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
        end: Literal["last", "normed"] = "last" if own is None else "normed"
        return cls(layers, tuple(points), end, size, mask, 0 if config.get("sample_from_anchor") else 1)


@drafter(
    "dflash",
    argument=":FOLDER",
    help="a published DFlash head that was trained for this model",
)
@dataclass(frozen=True)
class DFlash(FromFolder, HeadDrafter):
    """Drafts with a DFlash head (2026, arXiv 2602.06036): all tokens of a block in one pass, which is not causal.

    Its layers take keys and values of the text from the target's states, and keep none of drafted tokens.
    """

    _config: BlockConfig = field(init=False, repr=False, compare=False)
    holds = "DFlash head"
    essential = ("fc.weight", "hidden_norm.weight", "norm.weight")

    def __post_init__(self) -> None:
        super().__post_init__()
        if "sliding_attention" in (self._config.layers.get("layer_types") or ()):
            raise HeadError(f"{self.source} has layers with sliding windows, which are not read yet")

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> BlockConfig:
        return BlockConfig.of(config)

    @property
    def passes(self) -> type[PairState]:  # type: ignore[override]
        return ContextState

    @property
    def block(self) -> int:
        return self._config.size

    def points(self, depth: int) -> tuple[Point, ...]:
        return tuple(self._config.end if point == depth else point for point in self._config.points)

    def check(self, depth: int) -> None:
        beyond = [point for point in self._config.points if point > depth]
        if beyond:
            raise HeadError(f"{self.source} reads layer {beyond[0]}, and this model has {depth}: it is for another one")

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        check_for_head(model, "a draft head", self.weight_format)
        known, hidden = weight_of(model.get_input_embeddings()).shape
        own, read = self._shapes["fc.weight"]
        wanted = len(self._config.points) * hidden
        if read != wanted or (own != hidden and "embed_tokens.weight" not in self._shapes):
            raise HeadError(
                f"{self.source} was trained for another model: its fc reads {read} numbers, and this model of width "
                f"{hidden} gives {wanted}"
            )
        size = vocabulary_size(model)
        drafted = self._shapes.get("lm_head.weight", (size,))[0]
        if self._config.mask >= known or drafted > size:
            raise HeadError(
                f"{self.source} knows token {max(self._config.mask, drafted - 1)}, and this model has {known}: it is "
                "for another one"
            )

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        without = ("embed_tokens.weight", "t2d", "d2t")
        read = {name: shape for name, shape in self._shapes.items() if name not in without}
        # One pass drafts all tokens of a block.
        return share_of(bytes_read(read, model, self.weight_format), model, adapter) / (self._config.size - 1)

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        kept = {name: shape for name, shape in self._shapes.items() if name not in ("d2t", "t2d")}
        size = bytes_kept(kept, model, self.weight_format)
        token = cache_bytes_of_token(self._layers_config(), model.dtype)
        return OwnBytes(size, token, token * self._config.size)

    def _layers_config(self) -> PreTrainedConfig:
        numbers = [int(name.split(".")[1]) for name in self._shapes if name.startswith("layers.")]
        return layer_config({**self._config.layers, "num_hidden_layers": 1 + max(numbers)}, self.source)

    @torch.no_grad()
    def head(self, model: PreTrainedModel) -> Head:
        weights = self.weights()
        layers = causal_lm(self._layers_config(), None)
        adapter = find_adapter(layers)
        inside: Any = layers.get_submodule(adapter.base(layers))
        inside.embed_tokens = nn.Identity()
        hidden, read = self._shapes["fc.weight"]
        with torch.device("meta"):
            fusion = BlockFusion(self._config, read, hidden, inside.norm)
        for module in (inside, fusion):
            fill(module, weights, self.source)
            module.to(device=model.device, dtype=model.dtype)
        embed: Any = model.get_input_embeddings()
        if self._shapes["fc.weight"][0] != weight_of(embed).shape[1]:
            embed = nn.Embedding.from_pretrained(weights["embed_tokens.weight"].to(model.device, model.dtype))
        layers.lm_head = output_layer(weights, "lm_head.", model, self.source)
        layers.set_input_embeddings(embed)
        tokens = drafted_tokens(weights.get("d2t"), weights.get("t2d"), vocabulary_size(model), self.source)
        return Head(fusion, layers, adapter, "normed", embed, None if tokens is None else tokens.to(model.device))

    def proposer(self, state: PairState) -> LevelProposer:
        return LevelProposer(state, self._config.size - self._config.first)


class BlockFusion(Fusion):
    """Joins states of several layers of the target, of width `read` together, and norms them as `norm` does."""

    def __init__(self, config: BlockConfig, read: int, hidden: int, norm: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(read, hidden, bias=False)
        made: Any = type(norm)
        eps = getattr(norm, "variance_epsilon", 1e-6)
        self.hidden_norm = made(hidden, eps=eps)

    def state(self, features: Sequence[Tensor]) -> Tensor:
        joined: Tensor = self.hidden_norm(self.fc(torch.cat(list(features), -1)))
        return joined

    def inputs(self, embedded: Tensor, state: Tensor) -> Tensor:
        return embedded


class ContextState(PairState):
    """Keeps the keys and values that a DFlash head makes from the target's states; slot p belongs to token p."""

    kept = 0

    def _reaches(self, number: int) -> bool:
        return super()._reaches(number) or self._cache.seq_lens[number] > 0

    def levels_after_text(self, view: RowsView, depth: int) -> Tensor:
        self._drop(view.running)
        self._catch_up(view, 0)
        fusion = self.head.fusion
        assert isinstance(fusion, BlockFusion)
        config = fusion.config
        tokens = view.last_tokens.new_full((len(view.running), config.size), config.mask)
        tokens[:, :1] = view.last_tokens
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

    def _write(self, tokens: Tensor, states: Tensor, counts: Sequence[int]) -> Tensor:
        tables = self._tables(states)
        for number in range(len(self._base.layers)):
            self._store(number, states, tables)
        return states

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
