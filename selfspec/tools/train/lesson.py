"""A lesson: a loss for each batch, figures on held-out text, and how the result is saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.control.costs import Costs, forecast
from selfspec.draft import EarlyExit
from selfspec.measure.acceptance import Acceptance
from selfspec.model.early_head import DraftHead
from selfspec.model.sizes import share_read
from selfspec.tools.train.corpus import Blocks

# Blocks of held-out text read at once.
_BATCH = 4


class Lesson(ABC):
    """A lesson; `model` is trained, and its weights alone are in checkpoints; `held_out` is text to measure on."""

    model: nn.Module
    held_out: Blocks

    @abstractmethod
    def loss(self, model: nn.Module, batch: Blocks, step: int, steps: int) -> Tensor:
        """Return the loss of one batch after `step` of `steps` steps; `model` is `self.model`, perhaps wrapped."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return the figures on the held-out text, by name."""

    @abstractmethod
    def save(self, folder: Path, dtype: torch.dtype, figures: Mapping[str, float]) -> None:
        """Write the result, whose figures on the held-out text are known, into a folder that exists."""

    def measure(self) -> dict[str, float]:
        """Evaluate without gradients, in evaluation mode."""
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            figures = self.evaluate()
        self.model.train(training)
        return figures

    def measured(self) -> Iterator[Blocks]:
        """Yield the held-out text in batches, on the model's device."""
        return self.held_out.batches(_BATCH, next(self.model.parameters()).device)


class ExitMeter:
    """Adds up agreement and alpha of exits, and predicts their speed-up from the weights that a draft step reads."""

    def __init__(self, base: PreTrainedModel, adapter: Adapter, heads: Mapping[int, DraftHead | None]) -> None:
        depth = len(adapter.decoder_layers(base))
        self._costs = {
            exit_layer: Costs(share_read(base, adapter, EarlyExit(exit_layer).path(depth), head))
            for exit_layer, head in heads.items()
        }
        self._figures = {exit_layer: Acceptance() for exit_layer in heads}

    def add(self, full: Tensor, exit_layer: int, draft: Tensor) -> None:
        """Count logits of the full model and of an exit, `[positions, vocab]` both."""
        self._figures[exit_layer].add(full, draft)

    def named(self) -> dict[str, float]:
        """Return the figures, by name and exit."""
        named = {}
        for exit_layer, counted in self._figures.items():
            named[f"agreement_{exit_layer}"] = counted.agreement
            named[f"alpha_{exit_layer}"] = counted.alpha
            named[f"speedup_{exit_layer}"] = forecast(counted.alpha, self._costs[exit_layer]).speedup
        return named
