"""Runs passes of one model over one shared cache: any path, with logits or for their keys, values and states alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.cache.masks import needs_mask, smallest_window
from selfspec.cache.shared_cache import SharedCache, Slots
from selfspec.model.adapter import Adapter
from selfspec.model.early_head import DraftHead
from selfspec.model.gated_view import ExactStates, GatedModel
from selfspec.model.layer_path import LayerPath
from selfspec.runtime.graph_cache import GraphCache, PassKind
from selfspec.runtime.kernels.few_rows import for_few_rows
from selfspec.runtime.kernels.grouped_queries import for_grouped_queries
from selfspec.runtime.kernels.packed import packed_layers
from selfspec.runtime.pass_function import PassFunction, PassResult, PassTensors, model_inputs, run_view
from selfspec.runtime.recordable import frozen_view, is_watched


@dataclass(frozen=True)
class Pass:
    """What one pass gives.

    Attributes:
        logits: `[batch, tokens, vocab]`.
        states: what it left at `path.resume_point`; None where the path leaves nothing.
    """

    logits: Tensor
    states: ExactStates | None


class ModelRunner:
    """Every pass of one generation. Views are made once for each path and belong to this generation alone.

    Args:
        model: the stock causal LM.
        adapter: where its layers are.
        cache: what all passes read and write, from its cursors on.
        programs: of the wrapped model; None: the stock modules run every pass.
    """

    def __init__(
        self, model: PreTrainedModel, adapter: Adapter, cache: SharedCache, programs: GraphCache | None = None
    ) -> None:
        self.depth = len(adapter.decoder_layers(model))
        self._stock_model = model
        self._model = _fast(model)
        self._adapter = adapter
        self._cache = cache
        self._config = model.config.get_text_config(decoder=True)
        self._dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        parameters = inspect.signature(type(model).forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = next(name for name in ("past_key_values", "cache_params") if name in parameters)
        self._window = smallest_window(self._config)
        self._gated: dict[tuple[LayerPath, DraftHead | None], GatedModel] = {}
        # A runtime that needs passes of few shapes can do nothing for others.
        shaped = programs is None or programs.bucket == cache.bucket
        recordable = shaped and self._takes_positions and adapter.publishes is None
        self._programs = programs.bound_to(model) if programs and recordable else None
        self._packed = tuple(layer.weight for layer in packed_layers(model))

    def logits(
        self,
        path: LayerPath,
        tokens: Tensor,
        entering: ExactStates | None = None,
        head: DraftHead | None = None,
        first: int = -1,
    ) -> Pass:
        """Run `path` over tokens of the open block, with the language-model head.

        Args:
            path: what to run.
            tokens: of consecutive nodes, `[batch, tokens]`.
            entering: what enters at `path.start`.
            head: reads the last states of a path that leaves early; None: the model's own norm and head.
            first: the first of the nodes; -1: the last committed token.

        Raises:
            UnsupportedModelError: the block is a tree, and this model reads chains alone.
        """
        return self._spread(self._run(path, head, None, tokens, entering, first), head)

    def states(self, path: LayerPath, tokens: Tensor, first: int = -1) -> ExactStates | None:
        """Run `path` for the keys, values and states it leaves: no head, no logits. Arguments as in `logits`."""
        return self._run(path, None, self._base, tokens, None, first).states

    def logits_of_embeddings(self, embeddings: Tensor) -> Tensor:
        """Run the whole model over `embeddings`, `[batch, tokens, hidden]`; logits `[batch, tokens, vocab]`."""
        logits = self._run_stock(self._view(LayerPath.full(self.depth), None), None, embeddings, None).logits
        assert logits is not None
        return logits

    @property
    def keeps_last_logits(self) -> bool:
        """Whether the model can leave out logits of all but the last tokens of a pass."""
        return "logits_to_keep" in inspect.signature(type(self._stock_model).forward).parameters

    def last_logits(
        self,
        path: LayerPath,
        tokens: Tensor,
        most: int,
        entering: ExactStates | None = None,
        head: DraftHead | None = None,
    ) -> Pass:
        """Run `path` over a prompt, with logits of at most the last `most` tokens: see `logits`."""
        inputs = self._inputs(tokens)
        if self.keeps_last_logits:
            inputs["logits_to_keep"] = min(most, tokens.shape[1])
        return self._spread(run_view(self._view(path, head), None, entering, inputs), head)

    def prefill(self, tokens: Tensor, counts: Sequence[int]) -> None:
        """Read tokens of prompts for what they leave in the cache: keys, values and states.

        Args:
            tokens: `[batch, tokens]`, or their embeddings `[batch, tokens, hidden]`.
            counts: how many of them each row has; what comes behind them is scrap.
        """
        if not self._cache.empty or any(count < tokens.shape[1] for count in counts):
            self._run_stock(self._view(LayerPath.full(self.depth), None), self._base, tokens, None)
            return
        # Nothing to start from: the stock model reads them all at once, in recurrent layers too.
        base = self._model.get_submodule(self._base)
        base(**self._inputs(tokens))
        self._cache.record(tokens.shape[1])

    def _spread(self, result: PassResult, head: DraftHead | None) -> Pass:
        """What a pass gave, with logits of the whole vocabulary."""
        assert result.logits is not None
        if head is None:
            return Pass(result.logits, result.states)
        # Only a head of plain weights can be exchanged for one that draws on some of them.
        vocabulary = self._stock_model.get_output_embeddings().weight.shape[0]
        return Pass(head.spread(result.logits, vocabulary), result.states)

    @property
    def _base(self) -> str:
        return self._adapter.path(self._model)[0]

    def _run(
        self,
        path: LayerPath,
        head: DraftHead | None,
        base: str | None,
        tokens: Tensor,
        entering: ExactStates | None,
        first: int,
    ) -> PassResult:
        width = tokens.shape[1]
        if self._cache.tree is not None and not self._cache.tree.is_chain:
            self._adapter.check_trees(self._stock_model)
        with self._cache.reading(width, first):
            slots = None if self._programs is None else self._cache.slots(width, first)
            if self._programs is None or slots is None or is_watched(tokens.device):
                return self._run_stock(self._view(path, head), base, tokens, entering, first)
            kind = self._kind(path, head, base, tokens, entering, slots)
            return self._programs.run(
                kind,
                PassTensors(tokens, entering, slots, self._packed),
                stock=lambda: self._run_stock(self._view(path, head), base, tokens, entering, first),
                function=lambda: self._function(kind),
            )

    def _kind(
        self,
        path: LayerPath,
        head: DraftHead | None,
        base: str | None,
        tokens: Tensor,
        entering: ExactStates | None,
        slots: Slots,
    ) -> PassKind:
        rows, width = tokens.shape
        windowed = self._window is not None and slots.visible.shape[0] >= self._window
        padded = self._cache.padded(width)
        return PassKind(
            path=path,
            head=head,
            base=base,
            rows=rows,
            width=width,
            uniform=self._cache.uniform,
            masked=windowed or needs_mask(self._config, slots.slot_mapping, slots.block, padded),
            nodes=None if slots.block is None else slots.block.nodes,
            windowed=windowed,
            padded=padded,
            entering=None if entering is None else tuple(entering.attention),
        )

    def _run_stock(
        self, view: GatedModel, base: str | None, tokens: Tensor, entering: ExactStates | None, first: int = -1
    ) -> PassResult:
        return run_view(view, base, entering, self._inputs(tokens, first))

    def _function(self, kind: PassKind) -> PassFunction:
        twin = frozen_view(self._stock_model)
        packed, model = tuple(packed_layers(twin)), _fast(twin)
        view = self._gated_view(model, kind.path, kind.head)
        assert self._programs is not None
        calls = self._programs.put_calls(view, model, self._adapter)
        return PassFunction(
            view,
            calls,
            kind.base,
            self._cache_name,
            self._config,
            kind.masked,
            kind.nodes is not None,
            kind.padded,
            kind.entering,
            packed,
        )

    def _view(self, path: LayerPath, head: DraftHead | None) -> GatedModel:
        if (path, head) not in self._gated:
            self._gated[path, head] = self._gated_view(self._model, path, head)
        return self._gated[path, head]

    def _gated_view(self, model: PreTrainedModel, path: LayerPath, head: DraftHead | None) -> GatedModel:
        gated = GatedModel(model, self._adapter, path)
        if head is not None:
            assert path.resume_point is not None
            layer = self._adapter.decoder_layers(gated.module)[path.resume_point.layer]
            head.install(gated.module, model, layer)
        return gated

    def _inputs(self, tokens: Tensor, first: int = -1) -> dict[str, object]:
        width = tokens.shape[1]
        positions = self._cache.positions(width, first) if self._takes_positions else None
        mask = self._cache.attention_mask(self._config, width, self._dtype, first)
        return {self._cache_name: self._cache, **model_inputs(tokens, positions, mask)}


def _fast(model: nn.Module) -> PreTrainedModel:
    """A view of the model that gives the same in less time."""
    view = for_few_rows(for_grouped_queries(model))
    assert isinstance(view, PreTrainedModel)
    return view
