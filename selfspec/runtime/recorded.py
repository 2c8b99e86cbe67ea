"""Run passes by their recorded programs if there are any, else by the stock modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch.nn import functional
from transformers import PreTrainedModel

from selfspec.architecture import Adapter, takes_positions
from selfspec.cache.shared_cache import SharedCache, Slots
from selfspec.model.layer_path import LayerPath
from selfspec.model.positions import RowPositions
from selfspec.model.substitutes import Substitutes
from selfspec.model.view import is_streamed
from selfspec.runtime.graph_cache import BoundPrograms, GraphCache
from selfspec.runtime.model_state import frozen_view, is_watched
from selfspec.runtime.pass_function import PassFunction, PassKind, PassTensors
from selfspec.runtime.request import Chain, ChainStep, Draws, PassRequest, PassResult, Runs
from selfspec.runtime.runner import ModelRunner


class RecordedRunner(ModelRunner):
    """Hands passes of a round to the programs of the model; what has none runs on the stock modules."""

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: Adapter,
        cache: SharedCache,
        programs: BoundPrograms,
        substitutes: Substitutes | None = None,
    ) -> None:
        super().__init__(model, adapter, cache, substitutes, programs.view)
        self._programs = programs
        self._streaming: dict[Runs, bool] = {}

    def _run_in_block(self, request: PassRequest) -> PassResult:
        width = request.width
        plain = replace(request, tokens=request.tokens.contiguous())
        tensors = PassTensors.of(plain, self._cache) if request.change is None else None
        if tensors is None or is_watched(request.tokens.device) or self._streams(request):
            return self._run_stock(request)
        kind = self._kind(request, tensors)
        wider = self._wider(request, kind, tensors.slots)
        if wider is not None:
            # The modules, too: the number of tokens may decide the last bits.
            tensors, request = wider, replace(request, tokens=wider.tokens)
            kind = replace(kind, width=request.width)
        return self._programs.run(
            kind,
            tensors,
            width,
            stock=lambda: self._run_stock(request).first(width),
            function=lambda: self._function(kind),
        )

    def chain(self, request: PassRequest, draws: Draws) -> Chain | None:
        tokens = request.tokens
        first = PassTensors.of(replace(request, tokens=tokens.clone()), self._cache)
        # Positions of steps are counted up, and none may lie beyond the last.
        ends = max(self._cache.seq_lens) + draws.steps > self._cache.cursors.limit
        if first is None or first.slots.block is not None or ends:
            return None
        if is_watched(tokens.device) or self._streams(request):
            return None
        # Steps count the slots up in place, and the cache keeps those that it has given.
        first = replace(first, slots=replace(first.slots, slot_mapping=first.slots.slot_mapping.clone()))
        chain = self._programs.chain(self._kind(request, first), first, draws)
        return None if chain is None else Chain(chain.probs, self._read(chain.steps))

    def forget(self, path: LayerPath) -> None:
        super().forget(path)
        self._programs.forget(path)

    def _read(self, steps: Iterator[ChainStep]) -> Iterator[ChainStep]:
        """Let the cache know of each step."""
        for node, step in enumerate(steps, -1):
            with self._cache.reading(1, node):
                yield step

    def _streams(self, request: PassRequest) -> bool:
        """Return whether a pass streams weights, which no program does."""
        runs = request.runs
        if runs not in self._streaming:
            # Programs read substitutes where they are; making the view renews those of weights that have changed.
            self._streaming[runs] = any(map(is_streamed, self._view(runs).module.modules()))
        return self._streaming[runs]

    def _wider(self, request: PassRequest, kind: PassKind, slots: Slots) -> PassTensors | None:
        """Return the tensors with which a longer chain's program serves a request; extra slots are written again."""
        # Nothing may lie behind the last token.
        tree = self._cache.cursors.tree
        at_end = tree is None or (tree.is_chain and request.first + kind.width == len(tree))
        if not at_end or request.entering is not None:
            return None
        most = kind.width + slots.buffers[0].shape[2] - slots.visible.shape[0]
        found = replace(kind, width=self._programs.runtime.width(kind.width))
        more = self._programs.serving(found, most).width - kind.width
        if not 0 < more <= most - kind.width:
            return None
        behind = (0, 0) * (request.tokens.ndim - 2) + (0, more)
        tensors = PassTensors.of(replace(request, tokens=functional.pad(request.tokens, behind)), self._cache)
        return tensors if tensors is not None and self._programs.runtime.takes(tensors) else None

    def _kind(self, request: PassRequest, tensors: PassTensors) -> PassKind:
        slots, source = tensors.slots, tensors.source
        return PassKind(
            runs=request.runs,
            base=self._base_of(request),
            rows=request.tokens.shape[0],
            width=request.width,
            embedded=request.tokens.is_floating_point(),
            uniform=self._cache.cursors.uniform,
            nodes=None if slots.block is None else slots.block.nodes,
            padded=self._cache.cursors.padded(request.width),
            entering=None if request.entering is None else tuple(request.entering.attention),
            masked_source=None if source is None else source.mask is not None,
        )

    def _function(self, kind: PassKind) -> PassFunction:
        runtime = self._programs.runtime
        model = runtime.viewed(runtime.prepared(frozen_view(self._stock_model)))
        placed = None if self._adapter.positions is None else RowPositions(model, self._adapter)
        model = model if placed is None else placed.module
        assert isinstance(model, PreTrainedModel)
        view = self._gated_view(model, kind.runs)
        return PassFunction(view, kind, self._cache_name, self._config, self._takes_positions, placed)


def runner_for(
    model: PreTrainedModel,
    adapter: Adapter,
    cache: SharedCache,
    programs: GraphCache | None,
    substitutes: Substitutes | None = None,
    known: BoundPrograms | None = None,
) -> ModelRunner:
    """Make the runner of one generation; it records passes if `programs` are given and the model allows it.

    `known` are those of the model as it is now, if a call has looked them up.
    """
    recordable = (takes_positions(model) or adapter.positions is not None) and not adapter.publishes
    # A cache with another bucket than the programs were recorded for gives passes of too many shapes.
    if programs is not None and programs.bucket == cache.cursors.bucket and recordable:
        bound = programs.bound_to(model) if known is None else known
        if bound is not None:
            return RecordedRunner(model, adapter, cache, bound, substitutes)
    view = None if programs is None else programs.runtime.viewed(model)
    return ModelRunner(model, adapter, cache, substitutes, view)
