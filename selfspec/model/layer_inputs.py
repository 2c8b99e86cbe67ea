"""What a call of a stock model gives to its decoder layers, found without running them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.model.view import hidden_states, replaced, view_with_layers


def layer_inputs(model: PreTrainedModel, adapter: Adapter, inputs: Mapping[str, Any]) -> list[Any]:
    """List what the decoder layers of a model are given in a call: states, masks, rotary tables and the rest, in order.

    Each layer passes its states through, so no weight of a layer is read, and no cache is written to.
    """
    given: list[Any] = []
    layers = [replaced(layer, partial(_note, given, adapter.layer_returns)) for layer in adapter.decoder_layers(model)]
    view = view_with_layers(model, adapter.path(model), layers)
    with torch.no_grad():
        view(**inputs)
    return given


def same(first: list[Any], second: list[Any]) -> bool:
    """Whether two calls give the same to the decoder layers."""
    return len(first) == len(second) and all(
        torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one is other
        for one, other in zip(first, second, strict=True)
    )


def _note(given: list[Any], returns: int, *args: Any, **kwargs: Any) -> Any:
    # Where rotary tables were made of them, positions tell nothing more.
    made = kwargs.get("position_embeddings") is not None
    given.extend(
        _parts([args, {name: value for name, value in kwargs.items() if not (made and name == "position_ids")}])
    )
    hidden = hidden_states(args, kwargs)
    return hidden if returns == 1 else (hidden, *[None] * (returns - 1))


def _parts(value: Any) -> Iterator[Any]:
    """The tensors of nested arguments, and a mark where there is none."""
    if isinstance(value, Mapping):
        for name in sorted(value):
            yield from _parts(value[name])
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _parts(part)
    elif isinstance(value, Tensor) or value is None:
        yield value
