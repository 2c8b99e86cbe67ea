"""What is learnt: a loss for each batch, figures on held-out text, and how the result is saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.control.costs import Costs
from selfspec.control.forecast import forecast
from selfspec.draft import EarlyExit
from selfspec.measure.acceptance import ExitFigures
from selfspec.model.early_head import DraftHead
from selfspec.model.weights_read import share_read
from selfspec.tools.train.corpus import Blocks

# Blocks of held-out text read at once.
_BATCH = 4


class Lesson(ABC):
    """What is learnt.

    Attributes:
        model: the module that is trained; its weights alone are what a checkpoint holds.
        held_out: text to measure on.
    """

    model: nn.Module
    held_out: Blocks

    @abstractmethod
    def loss(self, model: nn.Module, batch: Blocks, step: int, steps: int) -> Tensor:
        """The loss of one batch.

        Args:
            model: `self.model`, perhaps inside a wrapper that computes it on several devices.
            batch: what it learns from, on the model's device.
            step: optimiser steps already made.
            steps: optimiser steps in all.
        """

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Figures on the held-out text, by name."""

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
        """The held-out text in batches, where the model is."""
        return self.held_out.batches(_BATCH, next(self.model.parameters()).device)


class ExitMeter:
    """Adds up agreement and alpha of exits, and predicts their speed-up from the weights a draft step reads.

    Where an exit has no head, the model's own norm and head read its states.
    """

    def __init__(self, base: PreTrainedModel, adapter: Adapter, heads: Mapping[int, DraftHead | None]) -> None:
        depth = len(adapter.decoder_layers(base))
        self._costs = {
            exit_layer: Costs(share_read(base, adapter, EarlyExit(exit_layer).path(depth), head))
            for exit_layer, head in heads.items()
        }
        self._figures = {exit_layer: ExitFigures() for exit_layer in heads}

    def add(self, full: Tensor, exit_layer: int, draft: Tensor) -> None:
        """Count logits of the full model and of an exit, `[positions, vocab]` both."""
        self._figures[exit_layer].add(full, draft)

    def named(self) -> dict[str, float]:
        """The figures, by name and exit."""
        named = {}
        for exit_layer, counted in self._figures.items():
            named[f"agreement_{exit_layer}"] = counted.agreement
            named[f"alpha_{exit_layer}"] = counted.alpha()
            named[f"speedup_{exit_layer}"] = forecast(counted.alpha(), self._costs[exit_layer]).speedup
        return named
