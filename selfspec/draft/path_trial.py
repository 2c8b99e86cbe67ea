"""Trying paths of a network in a pass that runs anyway: what each would have said after some of its tokens.

So weights are read once, whatever the number of paths. Exits are read off the states of the pass itself. Where layers
are left out, tokens are read again, once for each column: along the whole network, along each path that is given, and
along those that dynamic programming makes as the pass goes, as in CLaSp (Chen et al., 2025, arXiv 2505.24196).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from selfspec.architecture import Adapter
from selfspec.cache.tree import Tree
from selfspec.model.features import Point
from selfspec.model.view import hidden_states, replaced, view_with_layers
from selfspec.runtime.runner import Behind, ModelRunner, PassResult


@dataclass(frozen=True)
class Trial(Behind):
    """What is tried, on some of the first tokens of a block, each once for each column. Column 0 is the whole network.

    What comes of it is a `Tried`.

    Attributes:
        tokens: the most that are tried.
        greedy: whether decoding takes the likeliest tokens.
    """

    any_tree = True
    first: ClassVar[int]
    """The first node that is tried."""

    tokens: int
    greedy: bool

    @property
    @abstractmethod
    def columns(self) -> int:
        """How often a token is tried."""

    def tree(self, draft: Tree) -> Tree:
        return draft

    def run(self, runner: ModelRunner, block: Tensor, draft: Tree, taps: tuple[Point, ...]) -> PassResult:
        choices: list[Tensor] = []
        rows, width = block.shape
        tokens = self.added_to(block, draft)
        result = runner.changed(tokens, lambda whole: self.view(whole, runner.adapter, width, choices), taps)
        # What is tried lies in further rows or behind the block.
        return result.split(rows, width, self.tried(result.logits, width, choices))

    def added_to(self, block: Tensor, tree: Tree) -> Tensor:
        """Return the tokens of a draft's block and of these nodes, `[rows, 1 + nodes]`."""
        return block

    @abstractmethod
    def view(self, model: nn.Module, adapter: Adapter, behind: int, choices: list[Tensor]) -> nn.Module:
        """Make a view of a model that tries the paths: called like it, it gives their logits behind the block's.

        Args:
            model: a causal LM, or a view of one.
            adapter: where its layers are.
            behind: tokens of the block, which are read as ever.
            choices: receives for each layer which columns leave it out, `[rows, tokens, most]`, if any may.
        """

    @abstractmethod
    def by_column(self, logits: Tensor, behind: int) -> Tensor:
        """Return what this view gives as `[rows, tokens, columns, vocab]`."""

    def tried(self, logits: Tensor, behind: int, choices: list[Tensor]) -> Tried:
        """Return what came of it, by the logits and choices that the view gave."""
        probs = self.by_column(logits, behind).float().softmax(-1)
        best, shared = probs.argmax(-1), torch.minimum(probs, probs[:, :, :1]).sum(-1)
        chances = self._chances(shared, (best == best[:, :, :1]).float()) if self.greedy else shared
        return Tried(chances, torch.stack(choices, -1) if choices else None)

    def _chances(self, shared: Tensor, agree: Tensor) -> Tensor:
        """Return the chances of greedy decoding."""
        return agree


@dataclass(frozen=True)
class ExitTrial(Trial):
    """Leaves the network at each of some exits, on nodes of the block itself: their states there are exact.

    Attributes:
        exits: the first layer that each leaves out, at least 1.
    """

    first = -1

    exits: tuple[int, ...]

    @property
    def columns(self) -> int:
        return 1 + len(self.exits)

    def view(self, model: nn.Module, adapter: Adapter, behind: int, choices: list[Tensor]) -> nn.Module:
        layers: list[nn.Module] = adapter.decoder_layers(model)
        left: dict[int, Tensor] = {}
        for layer in self.exits:
            layers[layer] = replaced(layers[layer], partial(self._leave, layers[layer], layer, left))
        layers[-1] = replaced(layers[-1], partial(self._append, layers[-1], left))
        return view_with_layers(model, adapter.path(model), layers)

    @staticmethod
    def _leave(run: Callable[..., Any], layer: int, left: dict[int, Tensor], *args: Any, **kwargs: Any) -> Any:
        left[layer] = hidden_states(args, kwargs)
        return run(*args, **kwargs)

    def _append(self, run: Callable[..., Any], left: dict[int, Tensor], *args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        states = output[0] if isinstance(output, tuple) else output
        # As further rows, which norm and head read by themselves.
        states = torch.cat([states, *(left[layer] for layer in self.exits)], -3)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    def by_column(self, logits: Tensor, behind: int) -> Tensor:
        columns: Tensor = logits.unflatten(0, (self.columns, -1)).movedim(0, -2)
        return columns[:, : self.tokens]


@dataclass(frozen=True)
class PathTrial(Trial):
    """Leaves layers out, on tokens of a draft that are read again, in nodes of their own.

    Column j of the `most` after the first has after each layer the state nearest to column 0's that leaves out j of the
    layers so far: its own one after the layer, or that of column j - 1 before it.

    Attributes:
        most: how many layers the set leaves out that is looked for; 0: none is.
        skipped: the layers that each path leaves out which is given.
    """

    first = 0

    most: int
    skipped: tuple[frozenset[int], ...]

    @property
    def columns(self) -> int:
        return 1 + self.most + len(self.skipped)

    def tree(self, draft: Tree) -> Tree:
        # They see what the tokens that they read again see.
        tokens = range(min(self.tokens, draft.trunk))
        return Tree((*draft.parents, *(node - 1 for node in tokens for _ in range(self.columns))))

    def added_to(self, block: Tensor, tree: Tree) -> Tensor:
        read = block[:, 1 : 1 + min(self.tokens, tree.trunk)]
        return torch.cat([block, read.repeat_interleave(self.columns, 1)], 1)

    def view(self, model: nn.Module, adapter: Adapter, behind: int, choices: list[Tensor]) -> nn.Module:
        layers: list[nn.Module] = [
            replaced(layer, partial(self._run, layer, index, behind, choices))
            for index, layer in enumerate(adapter.decoder_layers(model))
        ]
        return view_with_layers(model, adapter.path(model), layers)

    def _run(
        self, layer: Callable[..., Any], index: int, behind: int, choices: list[Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        output = layer(*args, **kwargs)
        states = output[0] if isinstance(output, tuple) else output
        # Some models keep several streams of hidden states, before the batch.
        before, after = (self._columns(each[..., behind:, :]) for each in (hidden_states(args, kwargs), states))
        kept = list(after.unbind(-2))
        if self.most:
            own, other = after[..., 1 : self.most + 1, :], before[..., : self.most, :]
            run, skip = (_nearness(each, after[..., :1, :]) for each in (own, other))
            # Before this layer no column has left out more layers than there are.
            run[..., index:] = -torch.inf
            choices.append(skip > run)
            kept[1 : self.most + 1] = torch.where(choices[-1][..., None], other, own).unbind(-2)
        for column, skipped in enumerate(self.skipped, 1 + self.most):
            if index in skipped:
                kept[column] = before[..., column, :]
        states = torch.cat([states[..., :behind, :], torch.stack(kept, -2).flatten(-3, -2)], -2)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    def by_column(self, logits: Tensor, behind: int) -> Tensor:
        return self._columns(logits[:, behind:])

    def _columns(self, states: Tensor) -> Tensor:
        columns: Tensor = states.unflatten(-2, (-1, self.columns))
        return columns

    def _chances(self, shared: Tensor, agree: Tensor) -> Tensor:
        # All paths cost about the same, and where they agree says less of few tokens than how far.
        return (shared + agree) / 2


@dataclass(frozen=True)
class Tried:
    """What came of a trial.

    Attributes:
        chances: that a token which is drawn along a path is accepted, `[rows, tokens, columns]`: 1 - TV(p, q) where it
            is drawn; where it is the likeliest one, whether it is the target's.
        choices: which columns of those by dynamic programming leave out which layers, `[rows, tokens, most, layers]`.
    """

    chances: Tensor
    choices: Tensor | None

    def found(self, row: int, token: int) -> list[int]:
        """Return the layers to leave out after a token."""
        if self.choices is None:
            return []
        skipped, choices = [], self.choices[row, token].tolist()
        column = len(choices)
        for layer in reversed(range(len(choices[0]))):
            if column and choices[column - 1][layer]:
                skipped.append(layer)
                column -= 1
        return skipped


def _nearness(states: Tensor, target: Tensor) -> Tensor:
    """The cosine between the states of each column and the target's, `[rows, tokens, columns]`."""
    near = cosine_similarity(states.float(), target.float(), dim=-1)
    return near.mean(0) if near.ndim > 3 else near
