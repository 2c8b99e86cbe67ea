"""Run passes of one model over one shared cache: any path, with logits or for their keys, values and states alone.

`ModelRunner` runs the stock modules; `RecordedRunner` replaces their passes by recorded programs, where there are any.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from selfspec.architecture import Adapter, takes, takes_positions
from selfspec.cache.masks import Window
from selfspec.cache.shared_cache import SharedCache, Slots
from selfspec.compat import cache_argument
from selfspec.model.decodable import base_alone
from selfspec.model.early_head import plain_head
from selfspec.model.gated_view import Features, FeatureTap, GatedModel, Point
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.model.layer_path import LayerPath
from selfspec.model.positions import RowPositions
from selfspec.model.substitutes import Substitutes
from selfspec.model.view import is_streamed, view_with_parts
from selfspec.runtime.attention import for_new_lengths
from selfspec.runtime.graph_cache import BoundPrograms, GraphCache
from selfspec.runtime.model_state import frozen_view, is_watched
from selfspec.runtime.pass_function import PassFunction, PassKind, PassTensors, beside_source, model_inputs, run_view
from selfspec.runtime.request import Chain, ChainStep, Draws, PassRequest, PassResult, Races, Runs
from selfspec.runtime.runtime import Eager, Function


class ModelRunner:
    """Runs every pass of one generation by the stock modules, through views of them.

    Without `substitutes`, paths that need some make them for this generation; without a `view` of the whole model, it
    is that of `Eager`. `model` is the stock model, and `vocabulary` the number of logits of each token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: Adapter,
        cache: SharedCache,
        substitutes: Substitutes | None = None,
        view: PreTrainedModel | None = None,
    ) -> None:
        self.depth = len(adapter.decoder_layers(model))
        self.vocabulary = vocabulary_size(model)
        self.device = cache.cursors.device
        self._attending = for_new_lengths(cache.cursors.device)
        self.model = model
        self._viewed = Eager().viewed(model) if view is None else view
        self._placed = None
        if adapter.positions is not None:
            self._placed = RowPositions(self._viewed, adapter)
            self._viewed = self._placed.module
        self.adapter = adapter
        self._base = adapter.base(model)
        # None: code around the base acts on a pass, too, so that the whole model runs for states alone.
        self._runs_alone = self._base if base_alone(model, self._base) else None
        self.cache = cache
        self.substitutes = substitutes or Substitutes.of(model)
        self._config = model.config.get_text_config(decoder=True)
        self._dtype: torch.dtype = weight_of(model.get_input_embeddings()).dtype
        self._takes_positions = takes_positions(model)
        self._cache_name = cache_argument(model)
        self._gated: dict[Runs, GatedModel] = {}

    def over(self, cache: SharedCache) -> ModelRunner:
        """Return a runner of the same model, with the same views, over another cache for it."""
        other = copy(self)
        other.cache = cache
        return other

    def run(self, request: PassRequest) -> PassResult:
        """Run a pass. UnsupportedModelError: the block is a tree, and this model reads chains alone."""
        with self._reading(request):
            result = self._run_in_block(request)
        # Only a head of plain weights can be exchanged for one that draws on some of them.
        head = request.head
        return result if head is None else replace(result, logits=head.spread(result.logits, self.vocabulary))

    def chain(self, request: PassRequest, draws: Draws | Races) -> Chain | None:
        """Take draft steps in one go from the last committed tokens of a chain on; None: take them one by one."""
        return None

    @property
    def captures(self) -> bool:
        """True if functions that come again may be computed in one launch; see `repeat`."""
        return False

    def repeat(self, function: Function, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute a function of tensors; see `BoundPrograms.repeat`."""
        return function(tensors)

    @property
    def keeps_last_logits(self) -> bool:
        """True if the model can compute the logits of the last tokens of a pass alone."""
        return takes(self.model, "logits_to_keep")

    def prefill(self, tokens: Tensor, counts: Sequence[int], taps: tuple[Point, ...] = ()) -> Features:
        """Read prompts, `[batch, tokens]` or embeddings, into the cache; return the states of all tokens at `taps`.

        Row i has `counts[i]` tokens; what comes behind them is scrap.
        """
        with self._attending:
            if not self.cache.empty or any(count < tokens.shape[1] for count in counts):
                request = PassRequest(LayerPath.full(self.depth), tokens, taps=taps, headless=True)
                return self._run_stock(request).features
            # Nothing to start from: the stock model reads them all at once, in recurrent layers too.
            tap, base = FeatureTap(self._viewed, self.adapter, self._base, taps), self._runs_alone
            module = tap.module if base is None else tap.module.get_submodule(base)
            module(**self._called_with(module, tokens), **(self._last_kept if base is None else {}))
        self.cache.record(tokens.shape[1])
        return tap.take()

    def last_logits(self, tokens: Tensor) -> Tensor:
        """Read prompts of one length, `[batch, tokens]`, into the empty cache; return the last logits of each."""
        with self._attending:
            logits: Tensor = self._viewed(**self._called_with(self._viewed, tokens), **self._last_kept).logits
        # A model's own code may take the option and give all of them.
        return logits[:, -1:]

    def end(self) -> None:
        """Give back what the next text may use."""

    @contextmanager
    def _reading(self, request: PassRequest) -> Iterator[None]:
        """Prepare the cache for a pass over nodes of its block."""
        if request.tree is not None:
            self.cache.open(request.tree)
        if self.cache.cursors.tree is not None and not self.cache.cursors.tree.is_chain:
            self.adapter.check_trees(self.model)
        with self.cache.reading(request.width, request.first), self._attending:
            yield

    def _run_stock(self, request: PassRequest) -> PassResult:
        """Run a pass, whose nodes the cache expects, by the stock modules."""
        inputs = self._inputs(request.tokens, request.first, request.path.window)
        base = self._runs_alone if request.headless else None
        if base is None and request.headless:
            inputs |= self._last_kept
        return run_view(self._view(request.runs), base, request.entering, inputs, self.cache.source)

    @property
    def _last_kept(self) -> dict[str, object]:
        """The option that limits logits to the last tokens, if the model has it."""
        return {"logits_to_keep": 1} if self.keeps_last_logits else {}

    # Another runner replaces this.
    _run_in_block = _run_stock

    def _view(self, runs: Runs) -> GatedModel:
        if runs not in self._gated:
            self._gated[runs] = self._gated_view(self._viewed, runs)
        return self._gated[runs]

    def _gated_view(self, model: PreTrainedModel, runs: Runs) -> GatedModel:
        path, head = runs.path, runs.head
        gated = GatedModel(model, self.adapter, path, self.substitutes)
        name, rows = plain_head(self.model) if path.head_substituted else None, None
        parts: dict[str, nn.Module] = {}
        # Heads of other kinds run exactly.
        if path.format is not None and name is not None:
            whole = model.get_submodule(name)
            if head is None or head.tokens is None:
                parts[name] = self.substitutes.within(whole, name, path.format)
            else:
                rows = self.substitutes.of_rows(whole, path.format, head.tokens)
        if head is not None:
            end = min(path.skipped, default=None)
            exit = None if end is None else ".".join([*self.adapter.path(model), str(end.layer)])
            parts |= head.parts(gated.module, model, exit, rows)
        gated.module = view_with_parts(gated.module, parts)
        gated.tap(self.adapter, self._base, runs.taps)
        return gated

    def _inputs(self, tokens: Tensor, first: int = -1, window: Window | None = None) -> dict[str, object]:
        width = tokens.shape[1]
        positions = self.cache.cursors.position_ids(width, first) if self._takes_positions else None
        mask = self.cache.attention_mask(self._config, width, self._dtype, first, window)
        if self._placed is not None:
            self._placed.place(self.cache.cursors.positions(width, first))
        return {self._cache_name: self.cache.for_model, **model_inputs(tokens, positions, mask)}

    def _called_with(self, module: nn.Module, tokens: Tensor) -> dict[str, object]:
        """Return the arguments with which the model, or a part of it, reads the first tokens of prompts or blocks."""
        inputs, source = self._inputs(tokens), self.cache.source
        return inputs if source is None else beside_source(module, inputs, source)


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
        programs.begin(cache)

    def end(self) -> None:
        self._programs.end(self.cache)

    def _run_in_block(self, request: PassRequest) -> PassResult:
        width = request.width
        if not request.tokens.is_contiguous():
            request = replace(request, tokens=request.tokens.contiguous())
        tensors = PassTensors.of(request, self.cache)
        if tensors is None or is_watched(request.tokens.device) or self._streams(request):
            return self._run_stock(request)
        kind = self._kind(request, tensors)
        wider = self._wider(request, kind, tensors.slots)
        if wider is not None:
            # The modules, too: the number of tokens may decide the last bits.
            tensors, request = wider, replace(request, tokens=wider.tokens)
            kind = self._kind(request, tensors)
        result = self._programs.run(
            kind,
            tensors,
            width,
            stock=lambda: self._run_stock(request).first(width),
            function=lambda: self._function(kind),
        )
        if result.written:
            self.cache.write(result.written, width)
        return result

    def chain(self, request: PassRequest, draws: Draws | Races) -> Chain | None:
        first, cursors = PassTensors.of(request, self.cache), self.cache.cursors
        # Positions of steps are counted up, and none may lie beyond the last.
        ends = max(self.cache.seq_lens) + draws.steps > cursors.limit
        if first is None or first.slots.block is not None or ends:
            return None
        # All steps look at the slots that the first one looks at; programs without padding count these up, too.
        if cursors.padded(1) and cursors.visible(1, -1) != cursors.visible(1, draws.steps - 2):
            return None
        # Draws of a device take logits of all tokens.
        reduced = request.head is not None and request.head.tokens is not None and isinstance(draws, Races)
        if reduced or is_watched(request.tokens.device) or self._streams(request):
            return None
        chain = self._programs.chain(self._kind(request, first), first, draws)
        return None if chain is None else Chain(chain.probs, self._read(chain.steps))

    @property
    def captures(self) -> bool:
        return self._programs.runtime.captures

    def repeat(self, function: Function, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return function(tensors) if is_watched(tensors[0].device) else self._programs.repeat(function, tensors)

    def _read(self, steps: Generator[ChainStep, None, None]) -> Generator[ChainStep, None, None]:
        """Let the cache know of each step."""
        with closing(steps):
            for node, step in enumerate(steps, -1):
                with self.cache.reading(1, node):
                    yield step

    def _streams(self, request: PassRequest) -> bool:
        """Return whether a pass streams weights, which no program does."""
        runs = request.runs
        if runs not in self._streaming:
            # Programs read substitutes where they are; making the view renews those of weights that have changed.
            self._streaming[runs] = any(map(is_streamed, self._view(runs).module.modules()))
        return self._streaming[runs]

    def _wider(self, request: PassRequest, kind: PassKind, slots: Slots) -> PassTensors | None:
        """Return the tensors with which a wider program serves a request; extra slots are written again."""
        # Nothing may lie behind the last token.
        cursors, first = self.cache.cursors, request.first
        if request.entering is not None or not (cursors.tree is None or first + kind.width == len(cursors.tree)):
            return None
        most = slots.buffers[0].shape[2] - max(self.cache.seq_lens) - first - 1
        width, found = self._programs.runtime.width(kind.width), kind
        if kind.nodes is not None:
            nodes = cursors.nodes(width, first)
            found, most = replace(kind, width=width, nodes=nodes), min(most, nodes - first)
        elif width != kind.width:
            found = replace(kind, width=width)
        more = self._programs.serving(found, most).width - kind.width
        if not 0 < more <= most - kind.width:
            return None
        behind = (0, 0) * (request.tokens.ndim - 2) + (0, more)
        tensors = PassTensors.of(replace(request, tokens=functional.pad(request.tokens, behind)), self.cache)
        return tensors if tensors is not None and self._programs.runtime.takes(tensors) else None

    def _kind(self, request: PassRequest, tensors: PassTensors) -> PassKind:
        slots, source = tensors.slots, tensors.source
        return PassKind(
            runs=request.runs,
            base=self._runs_alone if request.headless else None,
            rows=request.tokens.shape[0],
            width=request.width,
            embedded=request.tokens.is_floating_point(),
            uniform=self.cache.cursors.uniform,
            nodes=None if slots.block is None else slots.block.nodes,
            padded=self.cache.cursors.padded(request.width),
            entering=None if request.entering is None else tuple(request.entering.attention),
            kept=self.cache.kept,
            masked_source=None if source is None else source.mask is not None,
        )

    def _function(self, kind: PassKind) -> PassFunction:
        runtime = self._programs.runtime
        model = runtime.viewed(runtime.prepared(frozen_view(self.model)))
        placed = None if self.adapter.positions is None else RowPositions(model, self.adapter)
        model = model if placed is None else placed.module
        assert isinstance(model, PreTrainedModel)
        view = self._gated_view(model, kind.runs)
        return PassFunction(view, kind, self._cache_name, self._config, self._dtype, self._takes_positions, placed)


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
    if programs is not None and programs.runtime.bucket == cache.cursors.bucket and recordable:
        bound = programs.bound_to(model) if known is None else known
        if bound is not None:
            return RecordedRunner(model, adapter, cache, bound, substitutes)
    view = None if programs is None else programs.runtime.viewed(model)
    return ModelRunner(model, adapter, cache, substitutes, view)
