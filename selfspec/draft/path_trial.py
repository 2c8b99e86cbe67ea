"""Trying paths of a network in a pass that runs anyway, to see what each path predicts after some of its tokens.

So weights are read once for any number of paths. Exits use the states of the pass itself. Paths that leave out layers
read tokens again, once for each column: along the whole network, along each given path, and along paths that dynamic
programming makes during the pass, as in CLaSp (Chen et al., 2025, arXiv 2505.24196).
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
    """Tries paths on some of the first tokens of a block, one path for each column; column 0 is the whole network.

    The result is a `Tried`.

    Attributes:
        tokens: the most tokens to try.
        greedy: whether decoding takes the likeliest tokens.
    """

    any_tree = True
    first: ClassVar[int]
    """The first node to try."""

    tokens: int
    greedy: bool

    @property
    @abstractmethod
    def columns(self) -> int:
        """Number of paths that a token is tried on, the whole network included."""

    def tree(self, draft: Tree) -> Tree:
        return draft

    def run(self, runner: ModelRunner, block: Tensor, draft: Tree, taps: tuple[Point, ...]) -> PassResult:
        choices: list[Tensor] = []
        rows, width = block.shape
        tokens = self.added_to(block, draft)
        result = runner.changed(tokens, lambda whole: self.view(whole, runner.adapter, width, choices), taps)
        # The trial's tokens lie in further rows or behind the block.
        return result.split(rows, width, self.tried(result.logits, width, choices))

    def added_to(self, block: Tensor, tree: Tree) -> Tensor:
        """Return the tokens of a draft's block and of the trial's own nodes, `[rows, 1 + nodes]`."""
        return block

    @abstractmethod
    def view(self, model: nn.Module, adapter: Adapter, behind: int, choices: list[Tensor]) -> nn.Module:
        """Make a view of a model that tries the paths: it is called like the model, and appends the paths' logits.

        Args:
            model: a causal LM, or a view of one.
            adapter: where its layers are.
            behind: number of tokens in the block, which are read as without a trial.
            choices: receives, for each layer, which columns leave it out, `[rows, tokens, most]`, if any may.
        """

    @abstractmethod
    def by_column(self, logits: Tensor, behind: int) -> Tensor:
        """Return the logits of this view as `[rows, tokens, columns, vocab]`."""

    def tried(self, logits: Tensor, behind: int, choices: list[Tensor]) -> Tried:
        """Return the result of the trial, given the logits and choices of the view."""
        probs = self.by_column(logits, behind).float().softmax(-1)
        best, shared = probs.argmax(-1), torch.minimum(probs, probs[:, :, :1]).sum(-1)
        chances = self._chances(shared, (best == best[:, :, :1]).float()) if self.greedy else shared
        return Tried(chances, torch.stack(choices, -1) if choices else None)

    def _chances(self, shared: Tensor, agree: Tensor) -> Tensor:
        """Return the acceptance rates under greedy decoding."""
        return agree


@dataclass(frozen=True)
class ExitTrial(Trial):
    """Tries exit layers on the nodes of the block itself, whose states there are exact.

    Attributes:
        exits: the first layer that each exit leaves out, at least 1.
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
        # They become further rows, so that the model's norm and head read them.
        states = torch.cat([states, *(left[layer] for layer in self.exits)], -3)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    def by_column(self, logits: Tensor, behind: int) -> Tensor:
        columns: Tensor = logits.unflatten(0, (self.columns, -1)).movedim(0, -2)
        return columns[:, : self.tokens]


@dataclass(frozen=True)
class PathTrial(Trial):
    """Tries skip sets on tokens of a draft, which are read again in nodes of their own.

    Columns 1 to `most` search a skip set. After each layer, column j has the state nearest to column 0's that skips j
    of the layers so far: either its own state after the layer, or the state of column j - 1 before the layer.

    Attributes:
        most: size of the skip set to search for; 0: no search.
        skipped: the layers that each given path leaves out.
    """

    first = 0

    most: int
    skipped: tuple[frozenset[int], ...]

    @property
    def columns(self) -> int:
        return 1 + self.most + len(self.skipped)

    def tree(self, draft: Tree) -> Tree:
        # Each node sees the same tokens as the token that it reads again.
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
        # Some models keep several streams of hidden states, in a dimension before the batch.
        before, after = (self._columns(each[..., behind:, :]) for each in (hidden_states(args, kwargs), states))
        kept = list(after.unbind(-2))
        if self.most:
            own, other = after[..., 1 : self.most + 1, :], before[..., : self.most, :]
            run, skip = (_nearness(each, after[..., :1, :]) for each in (own, other))
            # A column cannot skip more layers than have come so far.
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
        # All paths cost about the same; on few tokens, the shared probability tells more than agreement alone.
        return (shared + agree) / 2


@dataclass(frozen=True)
class Tried:
    """Holds the result of a trial.

    Attributes:
        chances: acceptance rates of tokens drafted along each path, `[rows, tokens, columns]`: 1 - TV(p, q) for a drawn
            token; for the likeliest token, whether it is the target's.
        choices: which columns of the search leave out which layers, `[rows, tokens, most, layers]`; None: no search.
    """

    chances: Tensor
    choices: Tensor | None

    def found(self, row: int, token: int) -> list[int]:
        """Return the skip set that the search found after a token."""
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
    """Return the cosine between the states of each column and the target's, `[rows, tokens, columns]`."""
    near = cosine_similarity(states.float(), target.float(), dim=-1)
    return near.mean(0) if near.ndim > 3 else near
