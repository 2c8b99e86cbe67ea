"""Reading a model at its exits: states before any layer, and the model's own norm and head over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.model.gated_view import ExactStates, GatedModel
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.view import hidden_states


class Readout:
    """What a stock model's exits would say, with gradients. The model itself is not changed."""

    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        self._layers = adapter.decoder_layers(model)
        self.depth = len(self._layers)
        first = Sublayer(0, Part.ATTENTION)
        # No layer runs, and states given at the first come out at the norm and the head.
        self._head = GatedModel(model, adapter, LayerPath.up_to(self.depth, first).resumed_at(first))

    @contextmanager
    def recorded(self, exits: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """The states `[batch, tokens, hidden]` at each exit, filled in as passes run inside the `with` block."""
        states: dict[int, Tensor] = {}

        def record(exit_layer: int, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[exit_layer] = hidden_states(args, kwargs)

        with ExitStack() as hooks:
            for each in exits:
                hooks.enter_context(
                    self._layers[each].register_forward_pre_hook(partial(record, each), with_kwargs=True)
                )
            yield states

    def logits(self, states: Tensor) -> Tensor:
        """The model's own norm and head, and whatever it does to logits, over states of any layer.

        States are `[batch, tokens, hidden]`, logits `[batch, tokens, vocab]`.
        """
        tokens = torch.zeros(states.shape[-3:-1], dtype=torch.long, device=states.device)
        self._head.enter(ExactStates(states))
        logits: Tensor = self._head.module(input_ids=tokens, use_cache=False).logits
        self._head.enter(None)
        return logits
