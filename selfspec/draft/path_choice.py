"""Drafting along the best of a family of paths, all tried every few rounds in a verification pass that runs anyway."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.arguments import shown
from selfspec.cache.tree import Tree
from selfspec.draft.along_layer_path import LayerPathDrafter, LayerPathProposer
from selfspec.draft.draft import Budget, Draft, Verdict
from selfspec.draft.drafter import Drafter, drafter, read_number
from selfspec.draft.early_exit import EarlyExit
from selfspec.draft.layer_skip import LayerSkip
from selfspec.draft.rows_view import RowsView, remembered
from selfspec.errors import DraftConfigError
from selfspec.model.gated_view import compared_view
from selfspec.model.layer_path import LayerPath, Part
from selfspec.model.registry import find_adapter
from selfspec.model.view import hidden_states, replaced, view_with_layers
from selfspec.runtime.request import Behind, PassRequest, PassResult
from selfspec.runtime.runner import ModelRunner

# The most paths of a family, and the most paths whose recorded passes a wrapper keeps.
FAMILY = 6
# Tokens of a trial, all rows together.
TOKENS = 4
# The most rounds between two trials.
_LONGEST = 32
# The speed-up over the path that drafts which another path must promise to replace it.
_CLEAR = 1.01
# The weight of a trial relative to the next one, and the tokens that the prior counts for, the mean of all paths.
_MEMORY, _PRIOR = 0.8, 2.0


class ChosenPath(Drafter):
    """Drafts along one path of a family, chosen during generation; all paths leave out whole layers.

    Every few rounds, verification tries all paths on its first tokens; the choice weighs acceptance rate against cost.
    It depends on earlier rounds alone, so the output is exact under every rule. Where rows are apart (see
    `FixedLength`), the first path drafts.
    """

    runs = "layers"
    branches = True

    @abstractmethod
    def family(self, depth: int) -> Sequence[LayerPathDrafter]:
        """Return the paths of a network of `depth` layers, the initial one first; raise DraftConfigError if none."""

    @abstractmethod
    def trial(self, family: Sequence[LayerPathDrafter], depth: int, rows: RowsView) -> Trial:
        """Return the trial of a family's paths, in their order."""

    @property
    def looked_for(self) -> int:
        """Size of the skip sets that trials add to the family; 0: the family never changes."""
        return 0

    def check(self, depth: int) -> None:
        for each in self.family(depth):
            each.check(depth)

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return self.family(len(adapter.decoder_layers(model)))[0].cost(model, adapter)

    def begin(self, rows: RowsView) -> ChosenPathProposer:
        return ChosenPathProposer(self, rows)


def _tokens_of(rows: RowsView) -> int:
    return max(TOKENS // len(rows.running), 1)


@dataclass
class Worth:
    """Holds a path's trial results: tokens tried, how many of them would be accepted, and the cost of a step."""

    cost: float
    accepted: float = 0.0
    tokens: float = 0.0

    def count(self, chance: float, tokens: int) -> None:
        self.accepted = _MEMORY * self.accepted + chance * tokens
        self.tokens = _MEMORY * self.tokens + tokens


def use_path(recent: list[LayerPath], path: LayerPath, runner: ModelRunner) -> None:
    """Note that a path drafts; beyond `FAMILY` paths, drop the recorded passes of the least recently used one."""
    recent[:] = [*(each for each in recent if each != path), path]
    if len(recent) > FAMILY:
        runner.forget(recent.pop(0))


class ChosenPathProposer(LayerPathProposer):
    """Drafts along the chosen path; `votes` count how often the skip sets of recent trials left out each layer."""

    def __init__(self, drafter: ChosenPath, rows: RowsView) -> None:
        family = drafter.family(rows.runner.depth)
        super().__init__(family[0], rows.runner.depth)
        self._drafter, self._looked_for, self._memory = drafter, drafter.looked_for, (type(drafter), "paths")
        self._model, self._depth = rows.runner.model, rows.runner.depth
        self._adapter = find_adapter(self._model)
        self.family = {each: self._unknown(each) for each in family}
        self.chosen, self._first_cost = family[0], self.family[family[0]].cost
        self.votes = [0.0] * self._depth
        self._rounds, self._due, self._gap, self._added = 0, 0, 1, False
        self._exchanges = 0
        # Which exit it leaves by may change.
        self.early_exit = None

    def _unknown(self, path: LayerPathDrafter) -> Worth:
        return Worth(path.cost(self._model, self._adapter))

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        draft = super().propose(rows, budget)
        if self._looked_for:
            # Verification would resume at another sublayer for each set, with another recorded pass each time.
            draft = replace(draft, resume=None)
        if not draft.steps or self._rounds < self._due or rows.rows_apart:
            return draft
        return replace(draft, behind=self._drafter.trial(list(self.family), self._depth, rows))

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        super().learn(rows, draft, target, verdict)
        self._rounds += draft.steps > 0
        trial, tried = draft.behind, target.behind
        if not isinstance(trial, Trial) or not isinstance(tried, Tried):
            return
        first = trial.first
        read = [
            (place, token, list(verdict.rows[number].path[: first + token + 1]) == [*range(first + token + 1)])
            for place, number in enumerate(rows.running)
            for token in range(tried.chances.shape[1])
            if number in verdict.rows
        ]
        # Rejected tokens are not part of the text. But a path must also lose its place if no token of it is accepted.
        standing = [(place, token) for place, token, accepted in read if accepted]
        self._count(tried, standing or [(place, token) for place, token, _ in read if not token])
        self._choose(rows)

    def _count(self, tried: Tried, read: Sequence[tuple[int, int]]) -> None:
        """Count a trial's result at some tokens, each given by its row's place and its own."""
        places, tokens = map(list, zip(*read, strict=True))
        chances: list[float] = tried.chances[places, tokens].mean(0).tolist()
        for worth, chance in zip(self.family.values(), chances[1 + self._looked_for :], strict=True):
            worth.count(chance, len(read))
        if not self._looked_for:
            return
        self.votes = [_MEMORY * votes for votes in self.votes]
        for place, token in read:
            for layer in tried.found(place, token):
                self.votes[layer] += 1
        order = sorted(range(self._depth), key=lambda layer: -self.votes[layer])
        voted = LayerSkip(layers=sorted(order[: self._looked_for]))
        self._added = voted not in self.family
        self._add(self._exchanged())
        self._add(voted)

    def _exchanged(self) -> LayerSkip:
        """Return the chosen skip set with one layer exchanged for another, a new pair in each call."""
        out = sorted(each.layer for each in self.chosen.path(self._depth).skipped if each.part is Part.ATTENTION)
        others = [layer for layer in range(self._depth) if layer not in out]
        self._exchanges += 1
        # The layer is far from the last one, and in the end every layer comes up.
        out[self._exchanges % len(out)] = others[int(self._exchanges * 0.618 * len(others)) % len(others)]
        return LayerSkip(layers=sorted(out))

    def _add(self, path: LayerPathDrafter) -> None:
        if path in self.family:
            return
        if len(self.family) == FAMILY:
            rates = self._rates()
            del self.family[min(rates.keys() - {self.chosen}, key=rates.__getitem__)]
        self.family[path] = self._unknown(path)

    def _rates(self) -> dict[LayerPathDrafter, float]:
        """Return each path's acceptance rate, shrunk towards the mean of all paths."""
        worths = self.family.values()
        mean = sum(each.accepted for each in worths) / sum(each.tokens for each in worths)
        return {path: (each.accepted + _PRIOR * mean) / (each.tokens + _PRIOR) for path, each in self.family.items()}

    def _choose(self, rows: RowsView) -> None:
        def speed(path: LayerPathDrafter) -> float:
            steps, rate = self.family[path].cost / self._first_cost, rates[path]
            return max(
                sum(rate**token for token in range(length + 1)) / rows.controller.price(steps * length, length)
                for length in range(1, rows.controller.most.depth + 1)
            )

        rates = self._rates()
        best = max(self.family, key=speed)
        stays = speed(best) < _CLEAR * speed(self.chosen)
        self._gap = min(2 * self._gap, _LONGEST) if stays and not self._added else self._gap
        self._due = self._rounds + self._gap
        if stays:
            return
        self.chosen, self._path = best, best.path(self._depth)
        if self._looked_for:
            use_path(remembered(rows, self._memory, list[LayerPath]), self._path, rows.runner)


@drafter(
    "del",
    argument=":E-F",
    example="del:2-6",
    help="early exit at a layer from E to F, which is chosen every few rounds",
)
@dataclass(frozen=True)
class ChosenExit(ChosenPath):
    """Drafts from an exit layer that adapts to the text, as in DEL (Zarch et al., 2025, arXiv 2504.05598).

    Attributes:
        earliest: the first exit layer.
        latest: the last exit layer.
    """

    earliest: int
    latest: int

    def __post_init__(self) -> None:
        if type(self.earliest) is not int or type(self.latest) is not int or self.earliest >= self.latest:
            raise DraftConfigError(
                f"exits are two integers, the earlier one first, got {shown(self.earliest)} and {shown(self.latest)}; "
                "write e.g. ChosenExit(2, 6)"
            )

    def family(self, depth: int) -> Sequence[LayerPathDrafter]:
        middle = (self.earliest + self.latest) // 2
        others = (layer for layer in range(self.earliest, self.latest + 1) if layer != middle)
        return [EarlyExit(layer) for layer in (middle, *others)]

    def trial(self, family: Sequence[LayerPathDrafter], depth: int, rows: RowsView) -> Trial:
        exits = tuple(each.layer for each in family if isinstance(each, EarlyExit))
        return ExitTrial(_tokens_of(rows), rows.greedy, exits)

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> ChosenExit:
        first, _, last = (argument or "").partition("-")
        return cls(read_number(first), read_number(last))

    @property
    def spelling(self) -> str:
        return f"del:{self.earliest}-{self.latest}"


@drafter("clasp", argument=":M", example="clasp:8", help="all but M layers, which are chosen every few rounds")
@dataclass(frozen=True)
class ChosenSkips(ChosenPath):
    """Drafts with a skip set that adapts to the text, as in CLaSp (Chen et al., 2025, arXiv 2505.24196).

    Attributes:
        layers: size M of the skip set; the first set spreads its layers evenly.
    """

    layers: int

    @property
    def looked_for(self) -> int:
        return self.layers

    @property
    def own_nodes(self) -> int:
        return TOKENS * (1 + self.layers + FAMILY)

    def family(self, depth: int) -> Sequence[LayerPathDrafter]:
        if type(self.layers) is not int or not 1 <= self.layers <= depth - 2:
            raise DraftConfigError(
                f"a draft leaves out {shown(self.layers)} layers; this model has {depth}, choose 1..{depth - 2}"
            )
        # The first layer and the last one are never skipped.
        inner = depth - 2
        return [LayerSkip(layers=[1 + (2 * each + 1) * inner // (2 * self.layers) for each in range(self.layers)])]

    def trial(self, family: Sequence[LayerPathDrafter], depth: int, rows: RowsView) -> Trial:
        skipped = tuple(frozenset(each.layer for each in path.path(depth).skipped) for path in family)
        return PathTrial(_tokens_of(rows), rows.greedy, self.layers, skipped)

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> ChosenSkips:
        return cls(read_number(argument))

    @property
    def spelling(self) -> str:
        return f"clasp:{self.layers}"


@dataclass(frozen=True)
class Trial(Behind):
    """Tries paths on at most `tokens` tokens of a block, one path for each column; column 0 is the whole network."""

    first: ClassVar[int]
    """The first node to try."""
    agreement: ClassVar[float] = 1.0
    """The weight of agreement beside the shared probability, under greedy decoding."""

    tokens: int
    greedy: bool

    def tree(self, draft: Tree) -> Tree:
        return draft

    def after_more(self) -> Trial:
        return self

    def run(self, request: PassRequest, tree: Tree, run: Callable[[PassRequest], PassResult]) -> PassResult:
        choices: list[Tensor] = []
        rows, width = request.tokens.shape
        tokens, change = self.added_to(request.tokens, tree), partial(self.view, behind=width, choices=choices)
        result = run(replace(request, tokens=tokens, change=change))
        # The trial's tokens lie in further rows or behind the block.
        return replace(result.first(width, rows), behind=self.tried(result.logits, width, choices))

    def added_to(self, block: Tensor, tree: Tree) -> Tensor:
        """Return the tokens of the block and of the trial's own nodes, `[rows, 1 + nodes]`."""
        return block

    @abstractmethod
    def view(self, model: nn.Module, adapter: Adapter, behind: int, choices: list[Tensor]) -> nn.Module:
        """Make a view of a model that reads `behind` tokens as the model does, and appends the paths' logits.

        `choices` receives, for each layer, the columns that leave it out, `[rows, tokens, most]`, if any may.
        """

    @abstractmethod
    def by_column(self, logits: Tensor, behind: int) -> Tensor:
        """Return the logits of this view as `[rows, tokens, columns, vocab]`."""

    def tried(self, logits: Tensor, behind: int, choices: list[Tensor]) -> Tried:
        probs = self.by_column(logits, behind).float().softmax(-1)
        best, shared = probs.argmax(-1), torch.minimum(probs, probs[:, :, :1]).sum(-1)
        weight = self.agreement if self.greedy else 0.0
        chances = weight * (best == best[:, :, :1]).float() + (1 - weight) * shared
        return Tried(chances, torch.stack(choices, -1) if choices else None)


@dataclass(frozen=True)
class ExitTrial(Trial):
    """Tries exit layers on the block itself, whose states are exact; an exit is the first layer left out."""

    first = -1

    exits: tuple[int, ...]

    def view(self, model: nn.Module, adapter: Adapter, behind: int, choices: list[Tensor]) -> nn.Module:
        return compared_view(model, adapter, self.exits)

    def by_column(self, logits: Tensor, behind: int) -> Tensor:
        columns: Tensor = logits.unflatten(0, (1 + len(self.exits), -1)).movedim(0, -2)
        return columns[:, : self.tokens]


@dataclass(frozen=True)
class PathTrial(Trial):
    """Tries skip sets on draft tokens, which are read again in nodes of their own.

    Columns 1 to `most` search a skip set of this size by dynamic programming. After each layer, column j keeps the
    state nearest to column 0's that skips j of the layers so far: its own after the layer, or that of column j - 1
    before it.
    """

    first = 0
    # All paths cost about the same; on few tokens, the shared probability tells more than agreement alone.
    agreement = 0.5

    most: int
    skipped: tuple[frozenset[int], ...]

    @property
    def columns(self) -> int:
        """Number of paths that a token is tried on, the whole network included."""
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


@dataclass(frozen=True)
class Tried:
    """Holds acceptance rates, `[rows, tokens, columns]`, and the search's skips, `[rows, tokens, most, layers]`."""

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
    """Return the cosine of each column's states with the target's, `[rows, tokens, columns]`."""
    near = cosine_similarity(states.float(), target.float(), dim=-1)
    return near.mean(0) if near.ndim > 3 else near
