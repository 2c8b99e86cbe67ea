"""Run passes by their recorded programs if there are any, else by the stock modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from selfspec.architecture import Adapter, takes_positions
from selfspec.cache.shared_cache import SharedCache, Slots
from selfspec.model.early_head import DraftHead
from selfspec.model.features import Point
from selfspec.model.layer_path import LayerPath
from selfspec.model.row_positions import RowPositions
from selfspec.model.substitutes import Substitutes
from selfspec.model.view import is_streamed
from selfspec.runtime.chain import Chain, ChainStep, Draws
from selfspec.runtime.graph_cache import BoundPrograms, GraphCache
from selfspec.runtime.pass_function import PassFunction, PassKind, PassOutput, PassTensors
from selfspec.runtime.recordable import frozen_view, is_watched
from selfspec.runtime.runner import ModelRunner, PassCall


class RecordedRunner(ModelRunner):
    """A runner that hands passes of a round to the programs of the model; what has none runs on the stock modules."""

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: Adapter,
        cache: SharedCache,
        programs: BoundPrograms,
        substitutes: Substitutes | None = None,
    ) -> None:
        super().__init__(model, adapter, cache, substitutes, programs.runtime)
        self._programs = programs
        self._streaming: dict[tuple[LayerPath, DraftHead | None, tuple[Point, ...]], bool] = {}

    def _run_in_block(self, call: PassCall) -> PassOutput:
        width = call.tokens.shape[1]
        tensors = self._tensors(call, call.tokens.contiguous())
        if tensors is None or is_watched(call.tokens.device) or self._streams(call):
            return self._run_stock(call)
        kind, slots = self._kind(call, tensors), tensors.slots
        wider = self._wider(call, kind, slots)
        if wider is not None:
            # The modules, too: the number of tokens may decide the last bits.
            kind, tensors, call = replace(kind, width=wider.tokens.shape[1]), wider, replace(call, tokens=wider.tokens)
        return self._programs.run(
            kind,
            tensors,
            width,
            stock=lambda: self._run_stock(call).first(width),
            function=lambda: self._function(kind),
        )

    def chain(self, path: LayerPath, tokens: Tensor, draws: Draws, head: DraftHead | None = None) -> Chain | None:
        call = PassCall(path, tokens, head=head)
        first = self._tensors(call, tokens.clone())
        # Positions of steps are counted up, and none may lie beyond the last.
        ends = max(self._cache.seq_lens) + draws.steps > self._cache.limit
        if first is None or first.slots.block is not None or ends or is_watched(tokens.device) or self._streams(call):
            return None
        # Steps count the slots up in place, and the cache keeps those that it has given.
        first = replace(first, slots=replace(first.slots, slot_mapping=first.slots.slot_mapping.clone()))
        chain = self._programs.chain(self._kind(call, first), first, draws)
        return None if chain is None else Chain(chain.probs, self._read(chain.steps))

    def forget(self, path: LayerPath) -> None:
        super().forget(path)
        self._programs.forget(path)

    def _read(self, steps: Iterator[ChainStep]) -> Iterator[ChainStep]:
        """Let the cache know of each step."""
        for node, step in enumerate(steps, -1):
            with self._cache.reading(1, node):
                yield step

    def _streams(self, call: PassCall) -> bool:
        """Return whether a pass streams weights, which no program does."""
        place = call.path, call.head, call.taps
        if place not in self._streaming:
            # Programs read substitutes where they are; making the view renews those of weights that have changed.
            self._streaming[place] = any(map(is_streamed, self._view(*place).module.modules()))
        return self._streaming[place]

    def _wider(self, call: PassCall, kind: PassKind, slots: Slots) -> PassTensors | None:
        """Return the tensors with which a longer chain's program serves this call; extra slots are written again."""
        # Nothing may lie behind the last token.
        tree = self._cache.tree
        at_end = tree is None or (tree.is_chain and call.first + kind.width == len(tree))
        if not at_end or call.entering is not None:
            return None
        most = kind.width + slots.buffers[0].shape[2] - slots.visible.shape[0]
        found = replace(kind, width=self._programs.runtime.width(kind.width))
        more = self._programs.serving(found, most).width - kind.width
        wider = 0 < more <= most - kind.width
        if not wider:
            return None
        behind = (0, 0) * (call.tokens.ndim - 2) + (0, more)
        tensors = self._tensors(call, functional.pad(call.tokens, behind))
        return tensors if tensors is not None and self._programs.runtime.takes(tensors) else None

    def _tensors(self, call: PassCall, tokens: Tensor) -> PassTensors | None:
        """Return a program's tensors for a call over these tokens; None: tensors cannot describe the call."""
        slots = self._cache.slots(tokens.shape[1], call.first, call.path.view)
        source = None if self._cache.source is None else self._cache.source.as_tensors(self.depth)
        if slots is None or (self._cache.source is not None and source is None):
            return None
        return PassTensors(tokens, call.entering, slots, source)

    def _kind(self, call: PassCall, tensors: PassTensors) -> PassKind:
        rows, width = call.tokens.shape[:2]
        slots, source = tensors.slots, tensors.source
        return PassKind(
            path=call.path,
            head=call.head,
            base=call.base,
            rows=rows,
            width=width,
            embedded=call.tokens.is_floating_point(),
            uniform=self._cache.uniform,
            nodes=None if slots.block is None else slots.block.nodes,
            padded=self._cache.padded(width),
            entering=None if call.entering is None else tuple(call.entering.attention),
            taps=call.taps,
            masked_source=None if source is None else source.mask is not None,
        )

    def _function(self, kind: PassKind) -> PassFunction:
        runtime = self._programs.runtime
        model = runtime.viewed(runtime.prepared(frozen_view(self._stock_model)))
        placed = None if self._adapter.positions is None else RowPositions(model, self._adapter)
        model = model if placed is None else placed.module
        assert isinstance(model, PreTrainedModel)
        view = self._gated_view(model, kind.path, kind.head, kind.taps)
        return PassFunction(view, kind, self._cache_name, self._config, self._takes_positions, placed)


def runner_for(
    model: PreTrainedModel,
    adapter: Adapter,
    cache: SharedCache,
    programs: GraphCache | None,
    substitutes: Substitutes | None = None,
) -> ModelRunner:
    """Make the runner of one generation: a recorded one where passes of this model can be recorded.

    Without `programs` the stock modules run every pass.
    """
    recordable = (takes_positions(model) or adapter.positions is not None) and not adapter.publishes
    # A cache with another bucket than the programs were recorded for gives passes of too many shapes.
    if programs is not None and programs.bucket == cache.bucket and recordable:
        bound = programs.bound_to(model)
        if bound is not None:
            return RecordedRunner(model, adapter, cache, bound, substitutes)
    return ModelRunner(model, adapter, cache, substitutes, None if programs is None else programs.runtime)
