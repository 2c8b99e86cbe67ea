"""The embedded checkpoint, and what the demonstration asks of it."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

MODEL_FOLDER = Path(str(files("selfspec.demo"))) / "model"
"""A `transformers` folder; its MODEL_CARD.md says what it is."""

PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "One day, a dog and a cat went to the park.",
    "Tom had a big red ball. He liked to",
)
"""Beginnings of stories such as the model was trained on."""
