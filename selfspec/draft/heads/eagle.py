"""EAGLE heads, from folders in the layouts of SafeAILab and of the speculators library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.draft.drafter import OwnBytes, drafter
from selfspec.draft.heads.folder import FromFolder, HeadFolder, drafted_tokens, fill, output_layer
from selfspec.draft.heads.growing_head import HeadDrafter, LevelProposer, share_of
from selfspec.draft.heads.head import Fusion, Head, bytes_kept, bytes_read, causal_lm, check_for_head, layer_config
from selfspec.draft.heads.pairs import PairState
from selfspec.errors import HeadError
from selfspec.model.features import Point
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.model.registry import find_adapter
from selfspec.model.sizes import cache_bytes_of_token

_FEWEST_LAYERS = 6


@dataclass(frozen=True)
class EagleConfig:
    """Describes a head, read from its folder in either layout.

    Attributes:
        points: numbers of the layers whose inputs it reads; empty: the usual three.
        target: width of the target; None: its own.
        drafted: number of tokens it drafts from; None: the folder does not say.
        normed_residual: True if the residual of `Eagle3Layer` is the state after its norm.
        norm: norm of the states that it reads, one for each or one for all; None: no norm.
        recycled: its state that stands for a drafted token.
        base: name of the model that it was trained for, for messages; empty: unknown.
    """

    layers: Mapping[str, Any]
    points: tuple[int, ...]
    target: int | None
    drafted: int | None
    normed_residual: bool
    norm: Literal["each", "all"] | None
    recycled: Literal["last", "normed"]
    base: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EagleConfig:
        """Read a config.json; raise `ValueError` if it describes no layers."""
        kind = config.get("speculators_model_type")
        own = config.get("eagle_config") or {}
        layers = config.get("transformer_layer_config") if kind else config
        points = config.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids") or ()
        if not isinstance(layers, dict) or not all(type(each) is int and each >= 0 for each in points):
            raise ValueError("its layers are described by no object, or named by no numbers")
        verifier = (config.get("speculators_config") or {}).get("verifier") or {}
        merged = {**own, **config}
        norm: Literal["each", "all"] | None = (
            "each" if merged.get("fc_norm") else "all" if merged.get("norm_before_fc") else None
        )
        return cls(
            layers,
            tuple(points),
            config.get("target_hidden_size"),
            config.get("draft_vocab_size"),
            bool(merged.get("norm_before_residual")),
            norm,
            "normed" if merged.get("norm_output") else "last",
            str(verifier.get("name_or_path") or ""),
        )


@drafter(
    "eagle",
    argument=":FOLDER",
    help="a published EAGLE head (1, 2 or 3) that was trained for this model",
)
@dataclass(frozen=True)
class Eagle(FromFolder, HeadDrafter):
    """Drafts with an EAGLE head: one layer over states of the target, which reads its own states for further tokens.

    EAGLE 1 and 2 (Li et al., 2024, arXiv 2401.15077 and 2406.16858) read the target's last states; EAGLE-3 (2025, arXiv
    2503.01840) reads those of three layers, and may draft from a vocabulary of fewer tokens.
    """

    _config: EagleConfig = field(init=False, repr=False, compare=False)
    holds = "EAGLE head"
    essential: ClassVar[tuple[str, ...]] = ("fc.weight",)

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> EagleConfig:
        return EagleConfig.of(config)

    @staticmethod
    def common_name(name: str) -> str:
        return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)

    @property
    def _is_third(self) -> bool:
        return "layers.0.hidden_norm.weight" in self._shapes

    def points(self, depth: int) -> tuple[Point, ...]:
        if not self._is_third:
            return ("normed",)
        chosen = self._config.points or (2, depth // 2, depth - 3)
        # The input of the layer after the last one is the output of the last.
        return tuple("last" if point == depth else point for point in chosen)

    def check(self, depth: int) -> None:
        if not self._is_third:
            return
        if not self._config.points and depth < _FEWEST_LAYERS:
            raise HeadError(f"{self.source} reads the usual three layers, and this model has {depth}, too few")
        beyond = [point for point in self._config.points if point > depth]
        if beyond:
            raise HeadError(f"{self.source} reads layer {beyond[0]}, and this model has {depth}: it is for another one")

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        check_for_head(model, "a draft head", self.weight_format)
        hidden = weight_of(model.get_input_embeddings()).shape[-1]
        count = len(self.points(len(adapter.decoder_layers(model))))
        own, read = self._shapes["fc.weight"]
        wanted = count * hidden if self._is_third else 2 * hidden
        foreign = self._config.target not in (None, hidden)
        if foreign or read != wanted or (own != hidden and "embed_tokens.weight" not in self._shapes):
            named = f", {self._config.base}" if self._config.base else ""
            differs = f"its fc reads {read} numbers, and this model of width {hidden} gives {wanted}"
            if foreign:
                differs = f"one of width {self._config.target}, and this one has {hidden}"
            raise HeadError(f"{self.source} was trained for another model{named}: {differs}")
        size = vocabulary_size(model)
        head = self._shapes.get("lm_head.weight", (size,))[0]
        if "d2t" in self._shapes and self._shapes["d2t"] != (head,):
            raise HeadError(f"{self.source} maps {self._shapes['d2t'][0]} tokens, and its head has {head}")
        known = self._shapes.get("t2d", (size,))[0]
        if known != size or ("d2t" not in self._shapes and head > size):
            of = f"of {known} " if known != size else ""
            raise HeadError(
                f"{self.source} drafts {head} {of}tokens, and this model knows {size}: it is for another one"
            )
        if "d2t" not in self._shapes and head < size and self._config.drafted == head:
            raise HeadError(f"{self.source} drafts {head} of {size} tokens, and lacks d2t, which says which")

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        read = {name: shape for name, shape in self._shapes.items() if name not in ("embed_tokens.weight", "t2d")}
        return share_of(bytes_read(read, model, self.weight_format), model, adapter)

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        # Embeddings are kept if they differ from the model's; the shapes do not tell, so they count.
        kept = {name: shape for name, shape in self._shapes.items() if name not in ("d2t", "t2d", "mask_hidden")}
        size = bytes_kept(kept, model, self.weight_format)
        return OwnBytes(size, cache_bytes_of_token(self._layers_config(), model.dtype))

    def _layers_config(self) -> PreTrainedConfig:
        return layer_config({**self._config.layers, "num_hidden_layers": self._layers()}, self.source)

    @torch.no_grad()
    def head(self, model: PreTrainedModel) -> Head:
        weights = self.weights()
        own = self._layers_config()
        own.attention_bias = "layers.0.self_attn.q_proj.bias" in weights
        kernel = model.config._attn_implementation
        third = self._is_third
        layers = eagle3_layers(own, kernel, self._config.normed_residual) if third else causal_lm(own, kernel)
        adapter = find_adapter(layers)
        inside: Any = layers.get_submodule(adapter.base(layers))
        fusion = self._fusion(own)
        if not third:
            inside.layers[0].input_layernorm = nn.Identity()
            inside.norm = inside.embed_tokens = nn.Identity()
        embed: Any = model.get_input_embeddings()
        given = weights.get("embed_tokens.weight")
        if given is not None and not _is_equal(given, weight_of(embed)):
            embed = nn.Embedding.from_pretrained(given)
        layers.lm_head = output_layer(weights if third else {}, "lm_head.", model, self.source)
        fill(inside, weights, self.source)
        fill(fusion, weights, self.source)
        for module in (fusion, inside, *([embed] if embed is not model.get_input_embeddings() else [])):
            module.to(device=model.device, dtype=model.dtype)
        layers.set_input_embeddings(embed)
        tokens = drafted_tokens(weights.get("d2t"), weights.get("t2d"), vocabulary_size(model), self.source)
        return Head(
            fusion,
            layers,
            adapter,
            self._config.recycled if self._is_third else "last",
            embed,
            None if tokens is None else tokens.to(model.device),
            self._masked(fusion, embed, weights),
        )

    def _masked(self, fusion: Fusion, embed: nn.Module, weights: Mapping[str, Tensor]) -> Tensor | None:
        return None

    def _layers(self) -> int:
        return 1 + max(int(name.split(".")[1]) for name in self._shapes if name.startswith("layers."))

    def _fusion(self, own: Any) -> Fusion:
        width, read = self._shapes["fc.weight"]
        with torch.device("meta"):
            if not self._is_third:
                return Eagle1Fusion(width, "fc.bias" in self._shapes)
            norm = None
            if self._config.norm is not None:
                norm = partial(nn.RMSNorm, eps=own.rms_norm_eps)
            count = len(self._config.points) or 3
            return Eagle3Fusion(read // count, count, width, norm, self._config.norm == "each")


def _is_equal(given: Tensor, own: Tensor) -> bool:
    same = given.shape == own.shape and not own.is_meta
    return same and torch.equal(given.to(own.dtype), own.detach().cpu())


class Eagle1Fusion(Fusion):
    """Joins an embedding and a state by one linear layer (EAGLE 1 and 2; Li et al., 2024)."""

    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * hidden, hidden, bias=bias)

    def inputs(self, embedded: Tensor, state: Tensor) -> Tensor:
        joined: Tensor = self.fc(torch.cat([embedded, state], -1))
        return joined


class Eagle3Fusion(Fusion):
    """Joins states of several layers of the target (EAGLE-3; Li et al., 2025), with norms of each, of all, or none."""

    def __init__(self, target: int, points: int, hidden: int, norm: Any = None, each: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(points * target, hidden, bias=False)
        self.fc_norm = nn.ModuleList(norm(target) for _ in range(points)) if norm is not None and each else None
        self.input_norm = None if norm is None or each else norm(points * target)

    def state(self, features: Sequence[Tensor]) -> Tensor:
        if self.fc_norm is not None:
            features = [norm(each) for norm, each in zip(self.fc_norm, features, strict=True)]
        joined = torch.cat(list(features), -1)
        state: Tensor = self.fc(joined if self.input_norm is None else self.input_norm(joined))
        return state

    def inputs(self, embedded: Tensor, state: Tensor) -> Tensor:
        return torch.cat([embedded, state], -1)


class Eagle3Layer(nn.Module):
    """Reads an embedding and a state, `[batch, tokens, 2 * hidden]`, and adds to the state, as a decoder layer."""

    def __init__(self, layer: nn.Module, config: PreTrainedConfig, normed_residual: bool) -> None:
        super().__init__()
        parts: Any = layer
        self.self_attn = parts.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(parts.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, old.out_features, bias=old.bias is not None, device="meta")
            setattr(self.self_attn, name, wide)
        self.mlp = parts.mlp
        self.input_layernorm = parts.input_layernorm
        self.post_attention_layernorm = parts.post_attention_layernorm
        with torch.device("meta"):
            self.hidden_norm = type(parts.input_layernorm)(config.hidden_size, eps=config.rms_norm_eps)
        self._normed_residual = normed_residual

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        embedded, state = hidden_states.chunk(2, -1)
        normed = self.hidden_norm(state)
        attended = self.self_attn(hidden_states=torch.cat([self.input_layernorm(embedded), normed], -1), **kwargs)[0]
        residual = (normed if self._normed_residual else state) + attended
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output


def eagle3_layers(config: PreTrainedConfig, attention: str | None, normed_residual: bool) -> PreTrainedModel:
    """Make the layers of an EAGLE-3 head on the meta device, as a causal LM that is called with joined inputs."""
    layers = causal_lm(config, attention)
    inside: Any = layers.get_submodule(find_adapter(layers).base(layers))
    inside.layers[0] = Eagle3Layer(inside.layers[0], config, normed_residual)
    inside.embed_tokens = nn.Identity()
    return layers


# Draft tokens of published heads, where the config.json does not say.
_USUAL = 8


@drafter(
    "peagle",
    argument=":FOLDER",
    help="a published P-EAGLE head that was trained for this model",
)
@dataclass(frozen=True)
class ParallelEagle(Eagle):
    """Drafts with a P-EAGLE head (2026, arXiv 2602.01469): one pass guesses all levels, independent of each other.

    In the place of the tokens to come it reads slots with the embedding of a mask token and a learnt state.
    """

    holds = "P-EAGLE head"
    essential = ("fc.weight", "mask_hidden", "layers.0.hidden_norm.weight")

    @property
    def _mask_token(self) -> int:
        config = HeadFolder.at(self.source).config()
        found = next((config[name] for name in ("mask_token_id", "ptd_token_id") if config.get(name) is not None), None)
        if type(found) is not int or found < 0:
            raise HeadError(f"the config.json of {self.source} names no mask_token_id; copy it from the original again")
        return found

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        super().check_model(model, adapter)
        own = self._shapes.get("embed_tokens.weight", (weight_of(model.get_input_embeddings()).shape[0],))[0]
        if self._mask_token >= own:
            raise HeadError(
                f"{self.source} masks with token {self._mask_token}, and this model knows {own}: it is for another one"
            )

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        # One pass drafts all tokens.
        return super().cost(model, adapter) / _USUAL

    def proposer(self, state: PairState) -> LevelProposer:
        return LevelProposer(state)

    def _masked(self, fusion: Fusion, embed: nn.Module, weights: Mapping[str, Tensor]) -> Tensor:
        table = weight_of(embed)
        assert isinstance(table, Tensor)
        count = len(self._config.points) or 3
        parts = weights["mask_hidden"].flatten().to(table.device, table.dtype).chunk(count)
        token = torch.tensor(self._mask_token, device=table.device)
        return fusion.inputs(embed(token), fusion.state(parts))
