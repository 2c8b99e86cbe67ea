"""Moonshine: speech into text, with rotary positions."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("canary", "cohere_asr", "moonshine", "moonshine_streaming"),
    layers="model.decoder.layers",
    attention=("self_attn", "encoder_attn"),
)
