"""Mamba and kin: one recurrent mixer in each layer, and no MLP."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("falcon_mamba", "mamba", "mamba2"),
    layers="backbone.layers",
    attention="mixer",
    recurrent=("mixer",),
    mlp=(),
)
