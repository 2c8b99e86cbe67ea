"""Passes over a block of tokens, on top of a prefix that the full model left in the cache."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.shared_cache import SharedCache
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner


class Bench:
    """A cache that holds the prefix of `[batch, past + block]` tokens, and passes over what comes next."""

    def __init__(self, model: PreTrainedModel, adapter: Adapter, cache: SharedCache, tokens: Tensor, past: int) -> None:
        self.tokens, self.cache = tokens, cache
        self.prefix, self.block = tokens[:, :past], tokens[:, past:]
        self.runner = ModelRunner(model, adapter, cache)
        self.full = LayerPath.full(len(adapter.decoder_layers(model)))
        if past:
            self.states(self.full, self.prefix)
            self.cache.commit([past] * len(tokens))

    @torch.no_grad()
    def logits(self, path: LayerPath, tokens: Tensor | None = None, entering: ExactStates | None = None) -> Tensor:
        return self.runner.run(PassRequest(path, self.block if tokens is None else tokens, entering)).logits

    @torch.no_grad()
    def states(self, path: LayerPath, tokens: Tensor | None = None) -> ExactStates | None:
        return self.runner.run(PassRequest(path, self.block if tokens is None else tokens, headless=True)).states

    @torch.no_grad()
    def steps(self, path: LayerPath) -> tuple[Tensor, ExactStates | None]:
        """Logits and states of the block, one token at a time, as drafts run it."""
        tokens = enumerate(self.block.split(1, 1))
        passes = [self.runner.run(PassRequest(path, token, first=column - 1)) for column, token in tokens]
        states = [step.states for step in passes if step.states is not None]
        logits = torch.cat([step.logits for step in passes], 1)
        return logits, ExactStates.concatenated(states) if states else None

    def stepped_states(self, path: LayerPath) -> ExactStates | None:
        """States of the block, one token at a time."""
        return self.steps(path)[1]

    def keys_and_values(self) -> list[tuple[Tensor, Tensor]]:
        """What lies in the slots of the prefix and the block, layer by layer."""
        width = self.tokens.shape[1]
        return [(layer.keys[:, :, :width].clone(), layer.values[:, :, :width].clone()) for layer in self.cache.layers]
