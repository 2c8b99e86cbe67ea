"""The jetmoe architecture: experts in the attention too."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(model_types=("jetmoe",), attention="self_attention", attention_returns=3)
