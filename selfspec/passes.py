"""Runs passes of one model over one shared cache: any path, with logits or for their keys, values and states alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.adapter import Adapter
from selfspec.cache import SharedCache
from selfspec.draft.draft_head import DraftHead
from selfspec.few_rows import for_few_rows
from selfspec.gate import ExactStates, GatedModel
from selfspec.path import Path


@dataclass(frozen=True)
class Pass:
    """What one pass gives.

    Attributes:
        logits: `[batch, tokens, vocab]`.
        states: what it left at `path.hand_over`; None where the path leaves nothing.
    """

    logits: Tensor
    states: ExactStates | None


class Passes:
    """Every pass of one generation. Views are made once for each path and belong to this generation alone.

    Args:
        model: the stock causal LM.
        adapter: where its layers are.
        cache: what all passes read and write, from its cursors on.
    """

    def __init__(self, model: PreTrainedModel, adapter: Adapter, cache: SharedCache) -> None:
        self.depth = len(adapter.decoder_layers(model))
        self._model: PreTrainedModel = for_few_rows(model)
        self._adapter = adapter
        self._cache = cache
        self._config = model.config.get_text_config(decoder=True)
        self._dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        parameters = inspect.signature(type(model).forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = next(name for name in ("past_key_values", "cache_params") if name in parameters)
        self._vocabulary: int = model.get_output_embeddings().weight.shape[0]
        self._gated: dict[tuple[Path, DraftHead | None], GatedModel] = {}

    def logits(
        self, path: Path, tokens: Tensor, entering: ExactStates | None = None, head: DraftHead | None = None
    ) -> Pass:
        """Run `path` over `tokens`, `[batch, tokens]`, with the language-model head.

        Args:
            path: what to run.
            tokens: what stands at the cursors and after them.
            entering: what enters at `path.start`.
            head: reads the last states of a path that leaves early; None: the model's own norm and head.
        """
        gated = self._view(path, head)
        gated.enter(entering)
        output = gated.module(**self._inputs(tokens))
        logits = output.logits if head is None else head.spread(output.logits, self._vocabulary)
        return Pass(logits, gated.leave())

    def states(self, path: Path, tokens: Tensor) -> ExactStates | None:
        """Run `path` over `tokens` for the keys, values and states it leaves: no head, no logits."""
        gated = self._view(path)
        base = gated.module.get_submodule(self._adapter.path(self._model)[0])
        base(**self._inputs(tokens))
        return gated.leave()

    def prefill(self, tokens: Tensor, counts: Sequence[int]) -> None:
        """Read tokens of prompts for what they leave in the cache: keys, values and states.

        Args:
            tokens: `[batch, tokens]`.
            counts: how many of them each row has; what comes behind them is scrap.
        """
        if any(self._cache.lengths) or any(count < tokens.shape[1] for count in counts):
            self.states(Path.full(self.depth), tokens)
            return
        # Nothing to start from: the stock model reads them all at once, in recurrent layers too.
        base = self._model.get_submodule(self._adapter.path(self._model)[0])
        base(**self._inputs(tokens))
        self._cache.record(tokens.shape[1])

    def _view(self, path: Path, head: DraftHead | None = None) -> GatedModel:
        if (path, head) not in self._gated:
            gated = GatedModel(self._model, self._adapter, path)
            if head is not None:
                assert path.hand_over is not None
                layer = self._adapter.decoder_layers(gated.module)[path.hand_over.layer]
                head.install(gated.module, self._model, layer)
            self._gated[path, head] = gated
        return self._gated[path, head]

    def _inputs(self, tokens: Tensor) -> dict[str, Any]:
        width = tokens.shape[1]
        positions = {"position_ids": self._cache.positions(width)} if self._takes_positions else {}
        return {
            **positions,
            "input_ids": tokens,
            "attention_mask": self._cache.attention_mask(self._config, width, self._dtype),
            self._cache_name: self._cache,
            "use_cache": True,
            "output_attentions": False,
            "output_hidden_states": False,
            "return_dict": True,
        }
