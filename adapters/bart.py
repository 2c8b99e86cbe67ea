"""Decoders of encoder-decoder architectures, used alone. They count positions from the length of the cache."""

from selfspec.architecture import Adapter

_NAMES = """
bart bigbird_pegasus blenderbot blenderbot-small marian mbart pegasus plbart whisper
"""

ADAPTER = Adapter(
    model_types=tuple(_NAMES.split()),
    layers="model.decoder.layers",
    mlp=("fc1", "fc2"),
    ragged="none",
)
