"""EAGLE heads, from folders in the layouts of SafeAILab and of the speculators library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.draft.drafter import drafter
from selfspec.draft.heads.folder import assembled
from selfspec.draft.heads.head import Fusion, Head, causal_lm, inside_of
from selfspec.draft.heads.layered import LayersConfig, LayersFromFolder
from selfspec.errors import HeadError
from selfspec.model.gated_view import Point

_FEWEST_LAYERS = 6


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayersConfig):
    """Describes a head, read from its folder in either layout."""

    normed_residual: bool  # True if the residual of `Eagle3Layer` is the state after its norm
    norm: Literal["each", "all"] | None  # norm of the states that it reads, one for each or one for all; None: no norm
    recycled: Literal["last", "normed"]  # its state that stands for a drafted token

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EagleConfig:
        """Read a config.json; raise `ValueError` if it describes no layers."""
        own = config.get("eagle_config") or {}
        layers = config.get("transformer_layer_config") if config.get("speculators_model_type") else config
        points = config.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids") or ()
        if not isinstance(layers, dict) or not all(type(each) is int and each >= 0 for each in points):
            raise ValueError("its layers are described by no object, or named by no numbers")
        verifier = (config.get("speculators_config") or {}).get("verifier") or {}
        merged = {**own, **config}
        return cls(
            layers=layers,
            points=tuple(points),
            target=config.get("target_hidden_size"),
            drafted=config.get("draft_vocab_size"),
            base=str(verifier.get("name_or_path") or ""),
            normed_residual=bool(merged.get("norm_before_residual")),
            norm="each" if merged.get("fc_norm") else "all" if merged.get("norm_before_fc") else None,
            recycled="normed" if merged.get("norm_output") else "last",
        )


@drafter("eagle", argument=":FOLDER", help="a published EAGLE head (1, 2 or 3) that was trained for this model")
@dataclass(frozen=True)
class Eagle(LayersFromFolder):
    """Drafts with an EAGLE head: one layer over states of the target, which reads its own states for further tokens.

    EAGLE 1 and 2 (Li et al., 2024, arXiv 2401.15077 and 2406.16858) read the target's last states; EAGLE-3 (2025, arXiv
    2503.01840) reads those of three layers, and may draft from a vocabulary of fewer tokens.
    """

    _config: EagleConfig = field(init=False, repr=False, compare=False)
    holds = "EAGLE head"
    essential: ClassVar[tuple[str, ...]] = ("fc.weight",)

    read_config = EagleConfig.of

    @staticmethod
    def common_name(name: str) -> str:
        return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)

    @property
    def _is_third(self) -> bool:
        return "layers.0.hidden_norm.weight" in self._shapes

    @property
    def joined(self) -> int:
        return super().joined if self._is_third else 2

    def features(self, depth: int) -> tuple[Point, ...]:
        return super().features(depth) if self._is_third else ("normed",)

    def check(self, depth: int) -> None:
        if not self._is_third:
            return
        if not self._config.points and depth < _FEWEST_LAYERS:
            raise HeadError(f"{self.source} reads the usual three layers, and this model has {depth}, too few")
        super().check(depth)

    @torch.no_grad()
    def head(self, model: PreTrainedModel) -> Head:
        weights, config = self.weights(), self.layers_config()
        config.attention_bias = "layers.0.self_attn.q_proj.bias" in weights
        kernel, third = model.config._attn_implementation, self._is_third
        layers = eagle3_layers(config, kernel, self._config.normed_residual) if third else causal_lm(config, kernel)
        if not third:
            inside = inside_of(layers)
            inside.layers[0].input_layernorm = inside.norm = nn.Identity()
            weights = {name: weight for name, weight in weights.items() if not name.startswith("lm_head.")}
        recycled = self._config.recycled if self._is_third else "last"
        return assembled(model, layers, self._fusion(config), weights, self.source, recycled)

    def _fusion(self, own: Any) -> Fusion:
        width, read = self._shapes["fc.weight"]
        with torch.device("meta"):
            if not self._is_third:
                return Eagle1Fusion(width, "fc.bias" in self._shapes)
            norm = None if self._config.norm is None else partial(nn.RMSNorm, eps=own.rms_norm_eps)
            return Eagle3Fusion(read // self.joined, self.joined, width, norm, self._config.norm == "each")


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
    inside = inside_of(layers)
    inside.layers[0] = Eagle3Layer(inside.layers[0], config, normed_residual)
    return layers
