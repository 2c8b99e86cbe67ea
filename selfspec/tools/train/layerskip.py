"""Train a model to be left early: layer dropout and losses of its exits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from selfspec.measure.acceptance import Readout
from selfspec.measure.checkpoint import Checkpoint
from selfspec.model.registry import find_adapter
from selfspec.tools.train.corpus import Blocks
from selfspec.tools.train.lesson import ExitMeter, Lesson
from selfspec.tools.train.recipe import LayerSkipRecipe

_UNLEARNT = -100


class LayerSkipLesson(Lesson):
    """Continues a causal LM on text by the LayerSkip recipe (Elhoushi et al., 2024); its weights change.

    Without a recipe it is plain training on the text, to compare with.
    """

    def __init__(self, base: Checkpoint, recipe: LayerSkipRecipe | None, held_out: Blocks) -> None:
        # Loaded to decode, weights ask for no gradient.
        self.model: PreTrainedModel = base.model.requires_grad_(True)
        self._tokenizer = base.tokenizer
        self._adapter = find_adapter(base.model)
        self._layers = self._adapter.decoder_layers(base.model)
        self._readout = Readout(base.model, self._adapter)
        self._recipe = recipe
        self._exits = (recipe or LayerSkipRecipe()).exits_of(len(self._layers))
        self.held_out = held_out

    def loss(self, model: nn.Module, batch: Blocks, step: int, steps: int) -> Tensor:
        recipe, ids = self._recipe, batch.ids
        if recipe is None:
            return _against_text(model(input_ids=ids, use_cache=False).logits, batch)
        depth = len(self._layers)
        active = recipe.active(depth, step, steps)
        rates = recipe.dropout_rates(depth, step, steps)
        with self._readout.recorded(active) as states, layer_dropout(self._layers, rates):
            full = model(input_ids=ids, use_cache=False).logits
        *shares, share = recipe.weights(depth, active)
        loss = share * _against_text(full, batch)
        teacher = full.detach().float().softmax(-1) if recipe.exit_target == "model" else None
        for exit_layer, weight in zip(active, shares, strict=True):
            logits = self._readout.logits(states[exit_layer])
            loss = loss + weight * (
                _against_text(logits, batch) if teacher is None else _against(logits, teacher, batch)
            )
        return loss

    def evaluate(self) -> dict[str, float]:
        meter = ExitMeter(self.model, self._adapter, dict.fromkeys(self._exits))
        loss, count = 0.0, 0
        for batch in self.measured():
            learnt, tokens = batch.before_learnt, int(batch.learnt[:, 1:].sum())
            with self._readout.recorded(self._exits) as states:
                full = self.model(input_ids=batch.ids, use_cache=False).logits
            loss, count = loss + float(_against_text(full, batch)) * tokens, count + tokens
            for exit_layer in self._exits:
                meter.add(full[learnt], exit_layer, self._readout.logits(states[exit_layer])[learnt])
        return {"held_out_loss": loss / max(count, 1), **meter.named()}

    def save(self, folder: Path, dtype: torch.dtype, figures: Mapping[str, float]) -> None:
        self.model.to(dtype).save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)


@contextmanager
def layer_dropout(layers: Sequence[nn.Module], rates: Sequence[float]) -> Iterator[None]:
    """Let each sample skip each layer at its rate inside the `with` block, drawn from torch's default generator."""
    with ExitStack() as hooks:
        for layer, rate in zip(layers, rates, strict=True):
            if rate > 0:
                hooks.callback(layer.register_forward_hook(_dropping(rate), with_kwargs=True).remove)
        yield


def _dropping(rate: float) -> Any:
    def drop(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        entered: Tensor = args[0] if args else kwargs["hidden_states"]
        # Drawn on the CPU, so that the same seed drops the same on any device.
        keeps = (torch.rand(entered.shape[0], 1, 1) >= rate).to(entered.device)
        if isinstance(output, tuple):
            return torch.where(keeps, output[0], entered), *output[1:]
        return torch.where(keeps, output, entered)

    return drop


def _against_text(logits: Tensor, batch: Blocks) -> Tensor:
    """Return the mean cross-entropy of the next token where it is learnt, in nats a token; 0 where none is."""
    wanted = batch.ids[:, 1:].masked_fill(~batch.learnt[:, 1:], _UNLEARNT)
    total = functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), wanted.flatten(), ignore_index=_UNLEARNT, reduction="sum"
    )
    return total / (wanted != _UNLEARNT).sum().clamp(min=1)


def _against(logits: Tensor, teacher: Tensor, batch: Blocks) -> Tensor:
    """Return the mean cross-entropy against distributions, `[batch, tokens, vocab]`, where learnt."""
    learnt = batch.before_learnt
    total = -(teacher[learnt] * logits[learnt].float().log_softmax(-1)).sum()
    return total / learnt.sum().clamp(min=1)
