"""Count how often a target accepts what drafts propose, by logits of both; and read what a model's exits would say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.model.gated_view import ExactStates, GatedModel
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.view import hidden_states

# Logits compared at a time: 64 MiB in float32.
_VALUES = 2**24


@dataclass
class Acceptance:
    """Sums over positions: where target and draft have one likeliest token, and of 1 - TV(p, q) at temperature 1."""

    positions: int = 0
    agreed: float = 0.0
    overlap: float = 0.0

    def add(self, full: Tensor, draft: Tensor) -> None:
        """Count some positions, by logits `[positions, vocab]`; the draft's are -inf where it has no such token."""
        self.positions += full.shape[0]
        self.agreed += float((full.argmax(-1) == draft.argmax(-1)).sum())
        for logits in zip(*(each.split(max(1, _VALUES // full.shape[-1])) for each in (full, draft)), strict=True):
            p, q = (each.float().softmax(-1) for each in logits)
            self.overlap += float(torch.minimum(p, q).sum())

    @property
    def agreement(self) -> float:
        """Share of the positions where both have one likeliest token."""
        return self.agreed / self.positions

    @property
    def alpha(self) -> float:
        """Acceptance rate at temperature 1, the mean of 1 - TV(p, q) (Leviathan et al., 2023)."""
        return self.overlap / self.positions


class Readout:
    """Reads what a stock model's exits would say, with gradients; the model is not changed."""

    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        self._layers = adapter.decoder_layers(model)
        self.depth = len(self._layers)
        first = Sublayer(0, Part.ATTENTION)
        # No layer runs, and states given at the first come out at the norm and the head.
        self._head = GatedModel(model, adapter, LayerPath.up_to(self.depth, first).resumed_at(first))

    @contextmanager
    def recorded(self, exits: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Yield the states at each exit, `[batch, tokens, hidden]`, filled in as passes run inside the `with` block."""
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
        """Apply the model's norm and head to states `[batch, tokens, hidden]`; return `[batch, tokens, vocab]`."""
        tokens = torch.zeros(states.shape[-3:-1], dtype=torch.long, device=states.device)
        self._head.enter(ExactStates(states))
        logits: Tensor = self._head.module(input_ids=tokens, use_cache=False).logits
        self._head.enter(None)
        return logits
