"""Layer dropout: while it is on, each sample of a batch skips each layer with a chance of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def layer_dropout(layers: Sequence[nn.Module], rates: Sequence[float]) -> Iterator[None]:
    """Let samples skip layers inside the `with` block. Draws come from torch's default generator.

    Args:
        layers: decoder layers, first to last.
        rates: chance of each to be skipped by a sample.
    """
    hooks = [
        layer.register_forward_hook(_dropping(rate), with_kwargs=True)
        for layer, rate in zip(layers, rates, strict=True)
        if rate > 0
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _dropping(rate: float) -> Any:
    def drop(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        entered: Tensor = args[0] if args else kwargs["hidden_states"]
        # Drawn on the CPU, so that the same seed drops the same on any device.
        keeps = (torch.rand(entered.shape[0], 1, 1) >= rate).to(entered.device)
        if isinstance(output, tuple):
            return torch.where(keeps, output[0], entered), *output[1:]
        return torch.where(keeps, output, entered)

    return drop
