"""The git architecture, text alone: a bert after an image encoder."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("git",),
    layers="git.encoder.layer",
    attention="attention",
    mlp=("intermediate", "output"),
    attention_returns=1,
    without_attention="input",
    without_mlp="residual",
)
