"""A small trained model for tests: five layers that write children's stories. Its MODEL_CARD.md says what it is."""

from __future__ import annotations

from pathlib import Path

PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "One day, a dog and a cat went to the park.",
    "Tom had a big red ball. He liked to",
)
"""Beginnings of stories such as the model was trained on."""


def checkpoint_folder() -> Path:
    """The `transformers` folder of the model."""
    return Path(__file__).parents[1] / "models" / "stories260K"
