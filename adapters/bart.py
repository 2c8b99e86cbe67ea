"""Encoder-decoders after the first, and their decoders alone. They count positions from the length of the cache."""

from selfspec.architecture import Adapter

_NAMES = """
bart bigbird_pegasus blenderbot blenderbot-small m2m_100 marian mbart pegasus pegasus_x plbart speech_to_text
whisper
"""

ADAPTER = Adapter(
    model_types=tuple(_NAMES.split()),
    layers="model.decoder.layers",
    attention=("self_attn", "encoder_attn"),
    mlp=("fc1", "fc2"),
    positions="embed_positions",
)
