"""The built-in prompts: prose, a fact, code and a list, so that any language model has something to go on from."""

from __future__ import annotations

PROMPTS = (
    "Once upon a time, there was a little",
    "The capital of France is",
    "def add(a, b):\n    return",
    "Monday, Tuesday, Wednesday,",
)
"""Short beginnings of texts."""
