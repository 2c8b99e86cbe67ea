"""An early exit beside the whole network: one pass of a stock model gives the logits of both."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.architecture import Adapter
from selfspec.model.early_head import DraftHead
from selfspec.model.view import hidden_states, replaced, view_with_layers


def compared_view(model: nn.Module, adapter: Adapter, exit_layer: int, head: DraftHead | None) -> nn.Module:
    """Make a view of a stock model whose last layer gives, as further rows after its own, the states at an exit.

    Norm and head read each token by itself, so one pass over both gives the logits of both: called like the model, the
    view gives `[2 * batch, tokens, vocab]`, those of the target first. The exit leaves out `exit_layer`, at least 1,
    and what follows; without a head it has the model's own.
    """
    layers = adapter.decoder_layers(model)
    at_exit: list[Tensor] = []
    layers[exit_layer] = replaced(layers[exit_layer], partial(_recording, layers[exit_layer], at_exit))
    layers[-1] = replaced(layers[-1], partial(_appending, layers[-1], at_exit, head))
    return view_with_layers(model, adapter.path(model), layers)


def _recording(layer: nn.Module, at_exit: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    at_exit.append(hidden_states(args, kwargs))
    return layer(*args, **kwargs)


def _appending(layer: nn.Module, at_exit: list[Tensor], head: DraftHead | None, *args: Any, **kwargs: Any) -> Any:
    output = layer(*args, **kwargs)
    left = at_exit.pop()
    if head is not None:
        left = head.adapted(left)
    # Some models keep several streams of hidden states, before the batch.
    if isinstance(output, tuple):
        return torch.cat([output[0], left], -3), *output[1:]
    return torch.cat([output, left], -3)
