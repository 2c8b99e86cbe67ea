"""Gemma 3n and 4, whose last layers read keys and values of earlier ones, and models that hold a language model."""

from selfspec.model.adapter import Adapter

_SHARED = "store_full_length_kv"

ADAPTERS = (
    Adapter(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), publishes=_SHARED),
    # Models of text and more whose language model is a part of theirs, used with text alone.
    Adapter(
        ("gemma3", "gemma4", "gemma4_unified", "got_ocr2", "fuyu"),
        layers="model.language_model.layers",
        publishes=_SHARED,
    ),
)
