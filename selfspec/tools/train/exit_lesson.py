"""The exit lesson: heads on a frozen base learn the full model's own distribution from the states at their exits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.control.forecast import forecast
from selfspec.measure.acceptance import ExitFigures
from selfspec.measure.readout import Readout
from selfspec.model.adapter import Adapter
from selfspec.tools.train.corpus import Blocks
from selfspec.tools.train.course import Lesson
from selfspec.tools.train.exit_costs import exit_costs
from selfspec.tools.train.exit_heads import ExitHeads

ExitLoss = Literal["kl", "tv", "both"]
"""What heads minimise: Kullback-Leibler divergence from the full model, total variation (1 - alpha), or their sum."""

# Blocks of held-out text read at once.
_BATCH = 4


class ExitLesson(Lesson):
    """Distils the full model into exit heads. The base stays as it is, and with it the output distribution.

    Args:
        base: the stock model; it is frozen.
        adapter: where its layers are.
        heads: what learns.
        loss: what they minimise.
        tokens: ids that can be drafted; None: all.
        held_out: text to measure on.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        adapter: Adapter,
        heads: ExitHeads,
        loss: ExitLoss,
        tokens: Tensor | None,
        held_out: Blocks,
    ) -> None:
        self.model: ExitHeads = heads
        self.held_out = held_out
        self._base = base.eval().requires_grad_(False)
        self._exits = [int(name) for name in heads.exits]
        self._readout = Readout(base, adapter)
        self._loss = loss
        self._tokens = None if tokens is None else tokens.to(base.device)
        self._costs = exit_costs(base, adapter, heads, tokens)

    def loss(self, model: nn.Module, ids: Tensor, step: int, steps: int) -> Tensor:
        states, full = self._read(ids)
        p = self._kept(full.softmax(-1))
        loss = torch.zeros((), device=ids.device)
        for adapted in model(states).values():
            log_q = self._kept(self._readout.logits(adapted).float()).log_softmax(-1)
            if self._loss != "tv":
                loss = loss - (p * log_q).sum(-1).mean()
            if self._loss != "kl":
                loss = loss + 1 - torch.minimum(p, log_q.exp()).sum(-1).mean()
        return loss / len(self._exits)

    def evaluate(self) -> dict[str, float]:
        figures = {exit_layer: ExitFigures() for exit_layer in self._exits}
        for ids in self.held_out.ids.to(self._base.device).split(_BATCH):
            states, full = self._read(ids)
            for exit_layer, adapted in self.model(states).items():
                draft = self._readout.logits(adapted)
                if self._tokens is not None:
                    left = torch.full_like(draft, -torch.inf)
                    draft = left.index_copy_(-1, self._tokens, self._kept(draft))
                figures[exit_layer].add(full.flatten(0, 1), draft.flatten(0, 1))
        named = {}
        for exit_layer, counted in figures.items():
            named[f"agreement_{exit_layer}"] = counted.agreement
            named[f"alpha_{exit_layer}"] = counted.alpha()
            named[f"speedup_{exit_layer}"] = forecast(counted.alpha(), self._costs[exit_layer]).speedup
        return named

    @torch.no_grad()
    def _read(self, ids: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        """States at the exits, and the full model's logits."""
        # A process of several finds out only now which device is its own.
        self._base.to(ids.device)
        with self._readout.recorded(self._exits) as states:
            full = self._base(input_ids=ids, use_cache=False).logits
        return states, full.float()

    def _kept(self, values: Tensor) -> Tensor:
        return values if self._tokens is None else values.index_select(-1, self._tokens)
