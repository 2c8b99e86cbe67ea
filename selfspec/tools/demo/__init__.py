"""The demonstration: an embedded model, and plain decoding and self-speculation measured side by side on it."""

from selfspec.measure.embedded import PROMPTS, checkpoint_folder

__all__ = ["PROMPTS", "checkpoint_folder"]
