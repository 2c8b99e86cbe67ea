"""Runs passes of one model over one shared cache: any path, with logits or for their keys, values and states alone.

This one runs the stock modules. `selfspec.runtime.recorded` has the other, which replaces their passes by programs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter, takes, takes_positions
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.tree import Tree
from selfspec.cache.view import WHOLE, CacheView
from selfspec.compat import cache_argument
from selfspec.model.early_head import DraftHead, plain_head, set_head
from selfspec.model.features import Features, FeatureTap, Point
from selfspec.model.gated_view import ExactStates, GatedModel, compared_view
from selfspec.model.layer_path import LayerPath
from selfspec.model.overrides import base_alone
from selfspec.model.row_positions import RowPositions
from selfspec.model.substitutes import Substitutes
from selfspec.model.vocabulary import vocabulary_size, weight_of
from selfspec.runtime.attention_kernels import for_new_lengths
from selfspec.runtime.attention_shares import AttentionShares
from selfspec.runtime.chain import Chain, Draws
from selfspec.runtime.pass_function import PassOutput, beside_source, model_inputs, run_view
from selfspec.runtime.runtime import Eager, Runtime


@dataclass(frozen=True)
class PassResult:
    """The result of one pass.

    Attributes:
        logits: `[batch, tokens, vocab]`.
        states: what it left at `path.resume_point`; None where the path leaves nothing.
        features: states of its tokens at the points that were asked for.
        behind: what came of the nodes behind a draft, as their kind of `Behind` returns it; None: there were none.
    """

    logits: Tensor
    states: ExactStates | None = None
    features: Features = field(default_factory=dict)
    behind: object = None

    def split(self, rows: int, width: int, behind: object) -> PassResult:
        """Return the result of the first `rows` rows and `width` tokens, beside what came of all others."""
        features = {point: states[..., :rows, :width, :] for point, states in self.features.items()}
        return PassResult(self.logits[:rows, :width], None, features, behind)


@dataclass(frozen=True)
class PassCall:
    """The path of a pass, with its inputs.

    Attributes:
        path: what it runs.
        tokens: of consecutive nodes of the open block, `[batch, tokens]`, or embeddings, `[batch, tokens, hidden]`.
        first: the first of the nodes; -1: the last committed token.
        entering: what enters at `path.start`.
        head: reads the last states of a path that leaves early; None: the model's own norm and head.
        base: attribute of the model that holds all but the head, and is all that runs; None: the head runs too.
        taps: points whose states are kept, of a path that runs there.
        reads_logits: whether all its logits are read; else the head, if it runs, reads the last token alone.
    """

    path: LayerPath
    tokens: Tensor
    first: int = -1
    entering: ExactStates | None = None
    head: DraftHead | None = None
    base: str | None = None
    taps: tuple[Point, ...] = ()
    reads_logits: bool = True


class ModelRunner:
    """Every pass of one generation, run by the stock modules.

    Views are made once for each path and belong to this generation alone.

    Args:
        model: the stock causal LM.
        adapter: where its layers are.
        cache: what all passes read and write, from its cursors on.
        substitutes: of the model; None: paths that need some make them for this generation.
        runtime: whose view of the model passes run; None: `Eager`.

    Attributes:
        vocabulary: number of logits of each token.
        substitutes: what its paths use.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: Adapter,
        cache: SharedCache,
        substitutes: Substitutes | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.depth = len(adapter.decoder_layers(model))
        self.vocabulary = vocabulary_size(model)
        self.device = cache.device
        self._stock_model = model
        self._model = (runtime or Eager()).viewed(model)
        self._placed = None
        if adapter.positions is not None:
            self._placed = RowPositions(self._model, adapter)
            self._model = self._placed.module
        self._adapter = adapter
        self._base = adapter.base(model)
        self._cache = cache
        self.substitutes = substitutes or Substitutes.of(model)
        self._config = model.config.get_text_config(decoder=True)
        self._dtype: torch.dtype = weight_of(model.get_input_embeddings()).dtype
        self._takes_positions = takes_positions(model)
        self._cache_name = cache_argument(model)
        self._gated: dict[tuple[LayerPath, DraftHead | None, tuple[Point, ...]], GatedModel] = {}
        self._shares: AttentionShares | None = None

    @property
    def model(self) -> PreTrainedModel:
        """Stock model whose passes it runs."""
        return self._stock_model

    @property
    def adapter(self) -> Adapter:
        """Where the layers of the model are."""
        return self._adapter

    @property
    def cache(self) -> SharedCache:
        """Cache that its passes read and write."""
        return self._cache

    def over(self, cache: SharedCache) -> ModelRunner:
        """Return a runner of the same model, with the same views, over another cache for it."""
        other = copy(self)
        other._cache = cache
        return other

    def logits(
        self,
        path: LayerPath,
        tokens: Tensor,
        entering: ExactStates | None = None,
        head: DraftHead | None = None,
        first: int = -1,
        taps: tuple[Point, ...] = (),
    ) -> PassResult:
        """Run `path` over tokens of the open block, with the language-model head. Arguments as in `PassCall`.

        Raises:
            UnsupportedModelError: the block is a tree, and this model reads chains alone.
        """
        call = PassCall(path, tokens, first, entering, head, taps=taps)
        with self._reading(call):
            return self._spread(self._run_in_block(call), head)

    def chain(self, path: LayerPath, tokens: Tensor, draws: Draws, head: DraftHead | None = None) -> Chain | None:
        """Take draft steps along `path` in one go, each over the token that the one before it chose.

        Args:
            path: leaves no states.
            tokens: the last committed ones, `[batch, 1]`, of the open block, which is a chain.
            draws: of the tokens, as many as there are nodes.
            head: reads the last states of the path; None: the model's own norm and head.

        Returns:
            None: they are to be taken one by one.
        """
        return None

    def states(self, path: LayerPath, tokens: Tensor, first: int = -1) -> ExactStates | None:
        """Run `path` for the keys, values and states it leaves: no head, no logits. Arguments as in `logits`."""
        call = PassCall(path, tokens, first, base=self._runs_alone, reads_logits=False)
        with self._reading(call):
            return self._run_in_block(call).states

    def logits_of_embeddings(self, embeddings: Tensor) -> Tensor:
        """Run the whole model over `embeddings`, `[batch, tokens, hidden]`; logits `[batch, tokens, vocab]`."""
        with for_new_lengths(self.device):
            logits = self._run_stock(PassCall(LayerPath.full(self.depth), embeddings)).logits
        assert logits is not None
        return logits

    @property
    def keeps_last_logits(self) -> bool:
        """True if the model can compute the logits of the last tokens of a pass alone."""
        return takes(self._stock_model, "logits_to_keep")

    def compare(self, exit_layer: int, head: DraftHead | None, tokens: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Run a prompt, with the logits of its last tokens at an early exit and at the end.

        Args:
            exit_layer: the first layer that the exit leaves out, at least 1.
            head: of the exit; None: the model's own norm and head.
            tokens: `[batch, tokens]`.
            most: how many tokens are compared at most.

        Returns:
            `[batch, tokens, vocab]` each: of the exit, -inf at tokens that cannot be drafted; and at the end.
        """
        view = compared_view(self._model, self._adapter, exit_layer, head)
        kept = self._kept(min(most, tokens.shape[1]))
        with for_new_lengths(self.device):
            target, draft = view(**self._called_with(view, tokens), **kept).logits[:, -most:].chunk(2)
        return (draft if head is None else head.alone(draft)), target

    def prefill(self, tokens: Tensor, counts: Sequence[int], taps: tuple[Point, ...] = ()) -> Features:
        """Read tokens of prompts for what they leave in the cache: keys, values and states.

        Args:
            tokens: `[batch, tokens]`, or embeddings, `[batch, tokens, hidden]`.
            counts: how many of them each row has; what comes behind them is scrap.
            taps: points whose states are kept.

        Returns:
            These states, of all tokens.
        """
        with for_new_lengths(self.device):
            if not self._cache.empty or any(count < tokens.shape[1] for count in counts):
                path = LayerPath.full(self.depth)
                call = PassCall(path, tokens, base=self._runs_alone, taps=taps, reads_logits=False)
                return self._run_stock(call).features
            # Nothing to start from: the stock model reads them all at once, in recurrent layers too.
            tap = FeatureTap(self._model, self._adapter, self._base, taps)
            self._run_for_states(tap.module, tokens)
        self._cache.record(tokens.shape[1])
        return tap.take()

    def choose_top(self, keys: int, tokens: Tensor, apart: Sequence[int] | None = None) -> None:
        """Choose the slots for drafts that attend to `keys` keys, in rows where the choice is due.

        This takes a plain step of the stock modules, whose keys and values verification writes again.

        Args:
            keys: of the cache's `top`.
            tokens: the last committed ones, `[batch, 1]`.
            apart: places of rows each of which chooses when it would alone; None: all rows do when one is to.
        """
        top, lengths = self._cache.top(keys), self._cache.seq_lens
        due = [row for row in top.due(lengths) if apart is None or row in apart]
        if not due:
            return
        if self._shares is None:
            self._shares = AttentionShares(self._model)
        with self._reading(PassCall(LayerPath.full(self.depth), tokens)), self._shares.noted() as shares:
            self._run_for_states(self._shares.module, tokens)
        long = [row for row, length in enumerate(lengths) if length > keys]
        top.choose(shares[0], lengths, long if apart is None else due)

    def changed(
        self, tokens: Tensor, change: Callable[[nn.Module], nn.Module], taps: tuple[Point, ...] = ()
    ) -> PassResult:
        """Run a changed view of the whole model over tokens of the open block, by the stock modules.

        Args:
            tokens: `[batch, tokens]`.
            change: returns a view of a causal LM that is called like it.
            taps: as in `PassCall`.
        """
        with self._reading(PassCall(LayerPath.full(self.depth), tokens)):
            view = change(self._view(LayerPath.full(self.depth), None).module)
            tap = FeatureTap(view, self._adapter, self._base, taps)
            logits = tap.module(**self._called_with(tap.module, tokens)).logits
        return PassResult(logits, features=tap.take())

    def forget(self, path: LayerPath) -> None:
        """Drop what was made for passes along a path; it is made again where they come again."""
        self._gated = {place: view for place, view in self._gated.items() if place[0] != path}

    def _spread(self, output: PassOutput, head: DraftHead | None) -> PassResult:
        """Spread the logits of a pass over the whole vocabulary."""
        assert output.logits is not None
        # Only a head of plain weights can be exchanged for one that draws on some of them.
        logits = output.logits if head is None else head.spread(output.logits, self.vocabulary)
        return PassResult(logits, output.states, output.features)

    @contextmanager
    def _reading(self, call: PassCall) -> Iterator[None]:
        """Prepare the cache for a pass over nodes of the open block."""
        if self._cache.tree is not None and not self._cache.tree.is_chain:
            self._adapter.check_trees(self._stock_model)
        with self._cache.reading(call.tokens.shape[1], call.first, call.path.view), for_new_lengths(self.device):
            yield

    def _run_stock(self, call: PassCall) -> PassOutput:
        """Run a pass, whose nodes the cache expects, by the stock modules."""
        view = self._view(call.path, call.head, call.taps)
        inputs = self._inputs(call.tokens, call.first, call.path.view)
        if call.base is None and not call.reads_logits:
            inputs |= self._kept(1)
        return run_view(view, call.base, call.entering, inputs, self._cache.source)

    @property
    def _runs_alone(self) -> str | None:
        """Base of the model, if it may run alone for the states of a pass; None: code around it acts on a pass, too."""
        return self._base if base_alone(self._stock_model, self._base) else None

    def _run_for_states(self, module: nn.Module, tokens: Tensor) -> None:
        """Run a view of the stock model over tokens for what they leave in the cache."""
        base = self._runs_alone
        runs, kept = (module, self._kept(1)) if base is None else (module.get_submodule(base), {})
        runs(**self._called_with(runs, tokens), **kept)

    def _kept(self, last: int) -> dict[str, object]:
        """Return the option that limits logits to the last tokens, if the model has it."""
        return {"logits_to_keep": last} if self.keeps_last_logits else {}

    # What another runner replaces.
    _run_in_block = _run_stock

    def _view(self, path: LayerPath, head: DraftHead | None, taps: tuple[Point, ...] = ()) -> GatedModel:
        if (path, head, taps) not in self._gated:
            self._gated[path, head, taps] = self._gated_view(self._model, path, head, taps)
        return self._gated[path, head, taps]

    def _gated_view(
        self, model: PreTrainedModel, path: LayerPath, head: DraftHead | None, taps: tuple[Point, ...] = ()
    ) -> GatedModel:
        gated = GatedModel(model, self._adapter, path, self.substitutes)
        name, rows = plain_head(self._stock_model) if path.head_substituted else None, None
        # Heads of other kinds run exactly.
        if path.precision is not None and name is not None:
            whole = model.get_submodule(name)
            if head is None or head.tokens is None:
                set_head(gated.module, name, self.substitutes.within(whole, name, path.precision))
            else:
                rows = self.substitutes.of_rows(whole, path.precision, head.tokens)
        if head is not None:
            end = path.exit_point
            layer = None if end is None else self._adapter.decoder_layers(gated.module)[end.layer]
            head.install(gated.module, model, layer, rows)
        gated.tap(self._adapter, self._base, taps)
        return gated

    def _inputs(self, tokens: Tensor, first: int = -1, view: CacheView = WHOLE) -> dict[str, object]:
        width = tokens.shape[1]
        positions = self._cache.position_ids(width, first) if self._takes_positions else None
        mask = self._cache.attention_mask(self._config, width, self._dtype, first, view)
        if self._placed is not None:
            self._placed.place(self._cache.positions(width, first))
        return {self._cache_name: self._cache.for_model, **model_inputs(tokens, positions, mask)}

    def _called_with(self, module: nn.Module, tokens: Tensor) -> dict[str, object]:
        """Return the arguments with which the model, or a part of it, reads the first tokens of prompts or blocks."""
        inputs, source = self._inputs(tokens), self._cache.source
        return inputs if source is None else beside_source(module, inputs, source)


class Behind(ABC):
    """Nodes behind a draft's own that the verifying pass reads for the drafter. None of them is judged."""

    @abstractmethod
    def tree(self, draft: Tree) -> Tree:
        """Return a draft's tree with these nodes behind its own."""

    def after_more(self) -> Behind | None:
        """Return the nodes to read if others join the draft's own; None: they follow the draft they were made for."""
        return None

    @abstractmethod
    def run(self, runner: ModelRunner, block: Tensor, draft: Tree, taps: tuple[Point, ...]) -> PassResult:
        """Run the target over a block and these nodes, for which the cache is open.

        Args:
            runner: of the target.
            block: the last committed token and those of the draft, `[rows, 1 + nodes]`.
            draft: its tree.
            taps: as in `PassCall`.

        Returns:
            The result of the block's own tokens; `behind` is what came of the others.
        """
