"""What an architecture has to declare so that its stock `transformers` model can be gated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn


@dataclass(frozen=True)
class Adapter:
    """Where an architecture keeps its decoder layers and their two sublayers.

    Attributes:
        model_types: the `config.model_type` values it serves.
        layers: attribute path from the causal LM to the `ModuleList` of decoder layers.
        attention: attribute of a decoder layer that holds its attention.
        mlp: attribute of a decoder layer that holds its MLP.
        layer_returns: what a decoder layer returns: the hidden states, or a tuple that begins with them.
    """

    model_types: tuple[str, ...]
    layers: str = "model.layers"
    attention: str = "self_attn"
    mlp: str = "mlp"
    layer_returns: Literal["tensor", "tuple"] = "tensor"

    def decoder_layers(self, model: nn.Module) -> list[nn.Module]:
        """The decoder layers of `model`, first to last."""
        layers = model.get_submodule(self.layers)
        assert isinstance(layers, nn.ModuleList)
        return list(layers)
