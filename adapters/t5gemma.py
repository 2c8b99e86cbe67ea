"""T5Gemma: an encoder and a decoder of gemma2's layers."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(model_types=("t5gemma",), layers="model.decoder.layers", attention=("self_attn", "cross_attn"))
