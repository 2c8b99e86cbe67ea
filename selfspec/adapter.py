"""What an architecture has to declare so that its stock `transformers` model can be gated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from selfspec.errors import UnsupportedModelError


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

    def check(self, model: nn.Module) -> None:
        """Refuse a model that does not have what this adapter names.

        Raises:
            UnsupportedModelError: naming what is missing.
        """
        try:
            layers = model.get_submodule(self.layers)
        except AttributeError as error:
            raise UnsupportedModelError(f"the adapter's layers={self.layers!r} is not in the model: {error}") from error
        if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
            raise UnsupportedModelError(f"the adapter's layers={self.layers!r} is no ModuleList of decoder layers")
        for name in (self.attention, self.mlp):
            if not all(isinstance(getattr(layer, name, None), nn.Module) for layer in layers):
                raise UnsupportedModelError(
                    f"the adapter names {name!r}, which {type(layers[0]).__name__} does not have; it has "
                    + ", ".join(child for child, _ in layers[0].named_children())
                )

    def decoder_layers(self, model: nn.Module) -> list[nn.Module]:
        """The decoder layers of `model`, first to last."""
        layers = model.get_submodule(self.layers)
        assert isinstance(layers, nn.ModuleList)
        return list(layers)
