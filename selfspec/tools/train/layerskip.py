"""The LayerSkip lesson: a model learns to be left early, by layer dropout and losses of its exits on its own head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from selfspec.control.forecast import forecast
from selfspec.measure.acceptance import ExitFigures
from selfspec.measure.readout import Readout
from selfspec.model.adapter import Adapter
from selfspec.tools.train.corpus import Blocks
from selfspec.tools.train.course import Lesson
from selfspec.tools.train.exit_costs import exit_costs
from selfspec.tools.train.layer_dropout import layer_dropout
from selfspec.tools.train.recipe import Recipe

# Blocks of held-out text read at once.
_BATCH = 4


class LayerSkipLesson(Lesson):
    """Continues a causal LM on text by the LayerSkip recipe (Elhoushi et al., 2024).

    Args:
        model: the stock model; its weights change.
        adapter: where its layers are.
        recipe: how exits are taught; None: not at all, plain training on the text, to compare with.
        held_out: text to measure on.
    """

    def __init__(self, model: PreTrainedModel, adapter: Adapter, recipe: Recipe | None, held_out: Blocks) -> None:
        self.model: PreTrainedModel = model
        self._adapter = adapter
        self._layers = adapter.decoder_layers(model)
        self._readout = Readout(model, adapter)
        self._recipe = recipe
        self._exits = (recipe or Recipe()).exits_of(len(self._layers))
        self.held_out = held_out

    def loss(self, model: nn.Module, ids: Tensor, step: int, steps: int) -> Tensor:
        recipe = self._recipe
        if recipe is None:
            return _against_text(model(input_ids=ids, use_cache=False).logits, ids)
        depth = len(self._layers)
        active = recipe.active(depth, step, steps)
        rates = recipe.dropout_rates(depth, step, steps)
        with self._readout.recorded(active) as states, layer_dropout(self._layers, rates):
            full = model(input_ids=ids, use_cache=False).logits
        *shares, share = recipe.weights(depth, active)
        loss = share * _against_text(full, ids)
        teacher = full.detach().float().softmax(-1) if recipe.exit_target == "model" else None
        for exit_layer, weight in zip(active, shares, strict=True):
            logits = self._readout.logits(states[exit_layer])
            loss = loss + weight * (_against_text(logits, ids) if teacher is None else _against(logits, teacher))
        return loss

    def evaluate(self) -> dict[str, float]:
        figures = {exit_layer: ExitFigures() for exit_layer in self._exits}
        losses = []
        for ids in self.held_out.ids.to(self.model.device).split(_BATCH):
            with self._readout.recorded(self._exits) as states:
                full = self.model(input_ids=ids, use_cache=False).logits
            losses.append(_against_text(full, ids) * ids.shape[0])
            for exit_layer, counted in figures.items():
                counted.add(full.flatten(0, 1), self._readout.logits(states[exit_layer]).flatten(0, 1))
        costs = exit_costs(self.model, self._adapter, None, None)
        named = {"held_out_loss": float(torch.stack(losses).sum()) / len(self.held_out)}
        for exit_layer, counted in figures.items():
            named[f"agreement_{exit_layer}"] = counted.agreement
            named[f"alpha_{exit_layer}"] = counted.alpha()
            named[f"speedup_{exit_layer}"] = forecast(counted.alpha(), costs[exit_layer]).speedup
        return named


def _against_text(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in nats a token."""
    return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def _against(logits: Tensor, teacher: Tensor) -> Tensor:
    """Mean cross-entropy against distributions, `[batch, tokens, vocab]`: KL but for a constant."""
    return -(teacher * logits.float().log_softmax(-1)).sum(-1).mean()
