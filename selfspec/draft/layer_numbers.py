"""What counts as a layer number: a true integer, neither a boolean nor a float that happens to be whole."""

from __future__ import annotations

from typing import TypeGuard

MOST_LAYERS = 10_000
"""Far more layers than any model has; a number beyond it is a slip of the hand."""


def is_layer_number(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)
