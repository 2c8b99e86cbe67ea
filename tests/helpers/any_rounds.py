"""A state machine over one shared cache: any rounds over any trees, every logit beside the stock model's own.

The reference of a node is one pass of the stock model, without a cache, over its row's committed tokens and the path to
the node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from transformers import PreTrainedModel

from helpers import tiny
from helpers.shrunken import shrunken
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache, recurrent_layers
from selfspec.cache.shared_layer import CacheKind
from selfspec.cache.tree import Tree
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath, Sublayer, sublayers
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import runner_for

DEPTH = tiny.DEPTH
NODES = 5
FIRST_WORD = 3
_LIMIT = 76
_MOST_ROWS = 3


@functools.cache
def _made_once(make: Callable[..., PreTrainedModel], *given: str, **options: str) -> PreTrainedModel:
    return make(*given, **options)


@torch.no_grad()
def alone(model: PreTrainedModel, tokens: Sequence[int], last: int) -> Tensor:
    """What the stock model says over the last tokens of one row, by itself and without a cache."""
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0, len(tokens) - last :]
    return logits


@st.composite
def trees(draw: st.DrawFn, least: int = 0) -> Tree:
    """Any tree that fits; one in a few is a chain."""
    nodes = draw(st.integers(least, NODES))
    return Tree(tuple(draw(st.integers(-1, node - 1)) for node in range(nodes)))


def a_number_for_each_row(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(least, most), min_size=_MOST_ROWS, max_size=_MOST_ROWS)


class AnyRounds(RuleBasedStateMachine):
    """Prefills of ragged prompts, then rounds: drafts, verification, and commits of any path in each row."""

    architecture = "llama"
    kernels: tuple[str, ...] = ("sdpa", "eager")
    # Eager attention takes its softmax in fp32, whatever the model's dtype.
    tolerance: ClassVar[dict[str, float]] = {"sdpa": 1e-9, "eager": 1e-4}
    bucket = 1
    kept: CacheKind = "exact"

    def built(self, kernel: str) -> PreTrainedModel:
        """The model; equal calls give the same one."""
        return _made_once(tiny.BUILDERS[self.architecture], attention=kernel)

    def graphs(self, model: PreTrainedModel) -> GraphCache | None:
        """Programs of the model; None: its modules run every pass."""
        return None

    @initialize(
        kernel=st.sampled_from(["sdpa", "eager"]),
        lengths=st.lists(st.integers(0, 9) | st.integers(55, 66), min_size=1, max_size=_MOST_ROWS),
        seed=st.integers(0, 1000),
    )
    def prefill(self, kernel: str, lengths: list[int], seed: int) -> None:
        self.kernel = kernel if kernel in self.kernels else self.kernels[0]
        self.model = self.built(self.kernel)
        self.noise = torch.Generator().manual_seed(seed)
        adapter = ADAPTERS[self.architecture]
        recurrent: Any = recurrent_layers(self.model.config) if adapter.recurrent else {}
        self.cache = SharedCache(
            DEPTH,
            len(lengths),
            _LIMIT,
            NODES,
            torch.device("cpu"),
            recurrent=recurrent,
            bucket=self.bucket,
            kept=self.kept,
        )
        self.runner = runner_for(self.model, adapter, self.cache, self.graphs(self.model))
        self.full = LayerPath.full(DEPTH)
        self.rows: list[list[int]] = [[] for _ in lengths]
        if not max(lengths):
            return
        self.cache.cursors.reserve(max(lengths) + 1)
        prompts, start = self._tokens(max(lengths)), 0
        while start < max(lengths):
            width = self.cache.prefill_width([max(length - start, 0) for length in lengths])
            counts = [min(max(length - start, 0), width) for length in lengths]
            with torch.no_grad():
                self.runner.prefill(prompts[:, start : start + width], counts)
            self.cache.commit(counts)
            start += width
        self.rows = [prompt[:length] for prompt, length in zip(prompts.tolist(), lengths, strict=True)]

    @property
    def longest(self) -> int:
        return max(map(len, self.rows))

    @precondition(lambda self: self.longest < _LIMIT)
    @rule(width=st.integers(1, NODES + 1), counts=a_number_for_each_row(0, NODES + 1))
    def chain(self, width: int, counts: list[int]) -> None:
        """No tree is opened: the block is a chain, and its first tokens are committed."""
        self.cache.cursors.reserve(self.longest + 1)
        tokens = self._tokens(width)
        self._check(Tree.chain(width - 1), tokens, self._run(tokens, -1))
        kept = [min(count, width, _LIMIT - len(row)) for row, count in zip(self.rows, counts, strict=False)]
        self.cache.commit(kept)
        self.rows = [row + new[:count] for row, new, count in zip(self.rows, tokens.tolist(), kept, strict=True)]

    @precondition(lambda self: self.longest < _LIMIT)
    @rule(
        tree=trees(),
        cuts=st.lists(st.integers(0, NODES + 1), max_size=3),
        again=st.booleans(),
        ends=a_number_for_each_row(-2, NODES - 1),
    )
    def tree(self, tree: Tree, cuts: list[int], again: bool, ends: list[int]) -> None:
        """Passes over runs of nodes, one after another, as over the frontiers of a tree; and perhaps one over all."""
        self.cache.cursors.reserve(self.longest + 1)
        self.cache.open(tree)
        tokens = self._tokens(len(tree) + 1)
        logits = [self._run(run, first) for run, first in _runs(tokens, cuts)]
        self._check(tree, tokens, torch.cat(logits, 1))
        if again:
            tokens = self._tokens(len(tree) + 1)
            self._check(tree, tokens, self._run(tokens, -1))
        self._commit(tree, tokens, ends)

    @precondition(lambda self: self.longest < _LIMIT)
    @rule(
        tree=trees(least=1),
        drafted=st.integers(1, NODES + 1),
        cuts=st.lists(st.integers(0, NODES + 1), max_size=3),
        start=st.sampled_from(sublayers(DEPTH)[1:]),
        whole=st.booleans(),
        ends=a_number_for_each_row(-2, NODES - 1),
    )
    def draft_and_resume(
        self, tree: Tree, drafted: int, cuts: list[int], start: Sublayer, whole: bool, ends: list[int]
    ) -> None:
        """Draft steps read the first nodes; the others are brought up to where the draft's work ends to be exact."""
        self.cache.cursors.reserve(self.longest + 1)
        self.cache.open(tree)
        tokens = self._tokens(len(tree) + 1)
        exact = LayerPath.up_to(DEPTH, start)
        path = exact if whole else LayerPath.without(DEPTH, [start])
        with torch.no_grad():
            runs = _runs(tokens[:, :drafted], cuts)
            parts = [self.runner.run(PassRequest(path, run, first=first)).states for run, first in runs]
            if drafted < tokens.shape[1]:
                parts.append(
                    self.runner.run(PassRequest(exact, tokens[:, drafted:], first=drafted - 1, headless=True)).states
                )
            entering = ExactStates.concatenated([part for part in parts if part is not None])
            logits = self.runner.run(PassRequest(self.full.resumed_at(start), tokens, entering)).logits
        self._check(tree, tokens, logits)
        self._commit(tree, tokens, ends)

    @rule(committed=st.integers(0, 2 * _LIMIT))
    def reserve(self, committed: int) -> None:
        self.cache.cursors.reserve(committed)

    @precondition(lambda self: len(self.rows) > 1)
    @rule(rows=st.permutations(range(_MOST_ROWS)), count=st.integers(1, _MOST_ROWS))
    def narrow(self, rows: list[int], count: int) -> None:
        kept = [row for row in rows if row < len(self.rows)][:count]
        self.cache.narrow(kept)
        self.rows = [self.rows[row] for row in kept]

    @invariant()
    def cursors_and_capacity_are_what_they_should_be(self) -> None:
        if not hasattr(self, "rows"):
            return
        assert self.cache.seq_lens == tuple(map(len, self.rows))
        assert self.cache.get_seq_length() == self.longest
        assert self.cache.cursors.tree is None
        # Slots come in whole buckets.
        assert self.cache.cursors.capacity < _LIMIT + NODES + self.cache.cursors.bucket
        slotted = [layer for layer in self.cache.layers if getattr(layer, "keys", None) is not None]
        for layer in slotted:
            assert layer.keys.shape[2] <= self.cache.cursors.capacity
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in slotted)
        assert self.cache.nbytes == held + self.cache.state_bytes

    def _tokens(self, width: int) -> Tensor:
        return torch.randint(FIRST_WORD, tiny.VOCABULARY, (len(self.rows), width), generator=self.noise)

    @torch.no_grad()
    def _run(self, tokens: Tensor, first: int) -> Tensor:
        return self.runner.run(PassRequest(self.full, tokens, first=first)).logits

    def _check(self, tree: Tree, tokens: Tensor, logits: Tensor) -> None:
        assert logits.isfinite().all()
        for row, new, found in zip(self.rows, tokens.tolist(), logits, strict=True):
            for path in _leaves(tree):
                nodes = [node + 1 for node in path]
                # What lies past the limit is scrap.
                whole = [*row, *(new[node] for node in nodes)][:_LIMIT]
                last = len(whole) - len(row)
                wanted = alone(self.model, whole, last)
                torch.testing.assert_close(found[nodes[:last]], wanted, rtol=0, atol=self.tolerance[self.kernel])

    def _commit(self, tree: Tree, tokens: Tensor, ends: Sequence[int]) -> None:
        paths: list[Sequence[int]] = []
        for row, end in zip(self.rows, ends, strict=False):
            # -2: nothing; -1: the last committed token alone.
            path = () if end < -1 else (-1, *(tree.paths[min(end, len(tree) - 1)] if end >= 0 and len(tree) else ()))
            paths.append(path[: _LIMIT - len(row)])
        self.cache.commit_paths(paths)
        self.rows = [
            [*row, *(new[node + 1] for node in path)]
            for row, new, path in zip(self.rows, tokens.tolist(), paths, strict=True)
        ]


def _leaves(tree: Tree) -> list[tuple[int, ...]]:
    """Paths from the last committed token, -1, to every node that has no child."""
    ends = [node for node in range(-1, len(tree)) if not tree.children[node + 1]]
    return [(-1, *(tree.paths[node] if node >= 0 else ())) for node in ends]


def _runs(tokens: Tensor, cuts: Sequence[int]) -> list[tuple[Tensor, int]]:
    """Tokens in runs that end at some places, each with the number of its first node."""
    places = sorted({0, tokens.shape[1], *(min(cut, tokens.shape[1]) for cut in cuts)})
    return [(tokens[:, start:end], start - 1) for start, end in pairwise(places)]


class AnyShrunkenRounds(AnyRounds):
    """The same for an architecture without a builder of its own."""

    # Many of these compute norms, rotary tables or states in float32, whatever the model's dtype.
    tolerance: ClassVar[dict[str, float]] = {"sdpa": 1e-4, "eager": 1e-4}

    def built(self, kernel: str) -> PreTrainedModel:
        return _made_once(shrunken, self.architecture, attn_implementation=kernel)


def any_rounds(machine: type[RuleBasedStateMachine], examples: int, steps: int = 12, **altered: Any) -> Any:
    """The test of a machine with other attributes: how often it runs, and how many rules each time."""
    made: Any = type(machine.__name__, (machine,), altered)
    made.TestCase.settings = settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if phase is not Phase.explain],
    )
    return made.TestCase
