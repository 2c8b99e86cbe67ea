"""How a stock model calls its layers and sublayers: the hidden states come first, by position or by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states of a call, `[batch, tokens, hidden]`."""
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def call_with(module: Callable[..., Any], hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module as it was called, but with other hidden states."""
    if args:
        return module(hidden, *args[1:], **kwargs)
    return module(**{**kwargs, "hidden_states": hidden})
