"""The embedded checkpoint, and what the demonstration asks of it."""

from __future__ import annotations

from pathlib import Path

PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "One day, a dog and a cat went to the park.",
    "Tom had a big red ball. He liked to",
)
"""Beginnings of stories such as the model was trained on."""


def checkpoint_folder() -> Path:
    """The `transformers` folder of the embedded model; its MODEL_CARD.md says what it is."""
    return Path(__file__).parent / "model"
