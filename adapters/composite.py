"""Models of text and more whose language model is a part of theirs, used with text alone."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(
    model_types=("gemma3", "gemma4", "gemma4_unified", "got_ocr2", "fuyu"),
    layers="model.language_model.layers",
    publishes="store_full_length_kv",
)
