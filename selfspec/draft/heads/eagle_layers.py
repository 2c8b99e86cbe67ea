"""The computation of EAGLE heads before their layers, and the first layer of EAGLE-3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.draft.heads.head import Fusion
from selfspec.draft.heads.own_layers import causal_lm
from selfspec.model.registry import find_adapter


class Eagle1Fusion(Fusion):
    """Joins an embedding and a state by one linear layer (EAGLE 1 and 2; Li et al., 2024).

    Args:
        hidden: width of the target and the head.
        bias: whether the linear layer has one.
    """

    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * hidden, hidden, bias=bias)

    def inputs(self, embedded: Tensor, state: Tensor) -> Tensor:
        joined: Tensor = self.fc(torch.cat([embedded, state], -1))
        return joined


class Eagle3Fusion(Fusion):
    """Joins states of several layers of the target (EAGLE-3; Li et al., 2025). The head's own states need no joining.

    Args:
        target: width of the target.
        points: number of layers whose states are read.
        hidden: width of the head.
        norm: makes a norm of a given width; None: no norm.
        each: whether each state has its own norm; else one norm covers all states together.
    """

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
    """Reads an embedding and a state, `[batch, tokens, 2 * hidden]`, and adds to the state, as a decoder layer.

    Args:
        layer: a stock layer, whose parts it takes.
        config: configuration of the head's layers.
        normed_residual: whether the residual is the state after its norm.
    """

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
    """Make the layers of an EAGLE-3 head as a causal LM on the meta device, which is called with joined inputs.

    Args:
        config: configuration of its layers.
        attention: the attention kernel; None: the default.
        normed_residual: see `Eagle3Layer`.
    """
    layers = causal_lm(config, attention)
    inside: Any = layers.get_submodule(find_adapter(layers).base(layers))
    inside.layers[0] = Eagle3Layer(inside.layers[0], config, normed_residual)
    inside.embed_tokens = nn.Identity()
    return layers
