"""Reading a model at its exits: states before any layer, and the model's own norm and head over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.model.adapter import Adapter
from selfspec.model.gated_view import ExactStates, GatedModel
from selfspec.model.layer_call import hidden_states
from selfspec.model.layer_path import LayerPath, Part, Sublayer


class Readout:
    """What a model's exits would say, with gradients. The model itself is not changed.

    Args:
        model: the stock causal LM.
        adapter: where its layers are.
    """

    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        self._layers = adapter.decoder_layers(model)
        self.depth = len(self._layers)
        first = Sublayer(0, Part.ATTENTION)
        # No layer runs, and states given at the first come out at the norm and the head.
        self._head = GatedModel(model, adapter, LayerPath.up_to(self.depth, first).resumed_at(first))

    def recorded(self, exits: Sequence[int]) -> AbstractContextManager[dict[int, Tensor]]:
        """The states `[batch, tokens, hidden]` at each exit, filled in as passes run inside the `with` block."""
        return recorded_states(self._layers, exits)

    def logits(self, states: Tensor) -> Tensor:
        """The model's own norm and head, and whatever it does to logits, over states of any layer.

        Args:
            states: `[batch, tokens, hidden]`.

        Returns:
            `[batch, tokens, vocab]`.
        """
        tokens = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
        self._head.enter(ExactStates(states))
        logits: Tensor = self._head.module(input_ids=tokens, use_cache=False).logits
        self._head.enter(None)
        return logits


@contextmanager
def recorded_states(layers: Sequence[nn.Module], places: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Record what enters some layers in the passes inside the `with` block.

    Args:
        layers: that run one after the other.
        places: indices of layers; behind the last: what the last one gives.
    """
    states: dict[int, Tensor] = {}

    def entering(place: int, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[place] = hidden_states(args, kwargs)

    def leaving(_layer: nn.Module, _args: Any, output: Any) -> None:
        states[len(layers)] = output[0] if isinstance(output, tuple) else output

    hooks = [
        layers[place].register_forward_pre_hook(partial(entering, place), with_kwargs=True)
        if place < len(layers)
        else layers[-1].register_forward_hook(leaving)
        for place in places
    ]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()
