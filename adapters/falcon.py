"""The falcon architecture: attention and MLP in parallel or not, rotary positions or ALiBi."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("falcon",), layers="transformer.h", attention="self_attention", layer_returns=2, ragged="padding"
)
