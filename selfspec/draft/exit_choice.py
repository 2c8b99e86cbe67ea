"""Drafting from the best of some exits, all tried every few rounds in a verification pass that runs anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.arguments import shown
from selfspec.cache.tree import Tree
from selfspec.draft.along_layer_path import LayerPathProposer
from selfspec.draft.draft import Budget, Draft, Verdict
from selfspec.draft.drafter import Drafter, drafter, read_number
from selfspec.draft.early_exit import EarlyExit
from selfspec.draft.rows_view import RowsView
from selfspec.errors import DraftConfigError
from selfspec.model.registry import find_adapter
from selfspec.runtime.request import Behind, PassRequest, PassResult

# Tokens of a trial, all rows together.
_TOKENS = 4
# The most rounds between two trials.
_LONGEST = 32
# The speed-up over the exit that drafts which another exit must promise to replace it.
_CLEAR = 1.01
# The weight of a trial relative to the next one, and the tokens that the prior counts for, the mean of all exits.
_MEMORY, _PRIOR = 0.8, 2.0


@drafter(
    "del",
    argument=":E-F",
    example="del:2-6",
    help="early exit at a layer from E to F, which is chosen every few rounds",
)
@dataclass(frozen=True)
class ChosenExit(Drafter):
    """Drafts from an exit layer that adapts to the text, as in DEL (Zarch et al., 2025, arXiv 2504.05598).

    Every few rounds, verification tries all exits on its first tokens; the choice weighs acceptance rate against cost.
    It depends on earlier rounds alone, so the output is exact under every rule. Where rows are apart (see
    `FixedLength`), the middle exit drafts.

    Attributes:
        earliest: the first exit layer.
        latest: the last exit layer.
    """

    runs = "layers"
    branches = True

    earliest: int
    latest: int

    def __post_init__(self) -> None:
        if type(self.earliest) is not int or type(self.latest) is not int or self.earliest >= self.latest:
            raise DraftConfigError(
                f"exits are two integers, the earlier one first, got {shown(self.earliest)} and {shown(self.latest)}; "
                "write e.g. ChosenExit(2, 6)"
            )

    @property
    def exits(self) -> Sequence[EarlyExit]:
        """The exits to choose from, the initial one, in the middle, first."""
        middle = (self.earliest + self.latest) // 2
        others = (layer for layer in range(self.earliest, self.latest + 1) if layer != middle)
        return [EarlyExit(layer) for layer in (middle, *others)]

    def check(self, depth: int) -> None:
        for each in self.exits:
            each.check(depth)

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return self.exits[0].cost(model, adapter)

    def begin(self, rows: RowsView) -> ChosenExitProposer:
        return ChosenExitProposer(self.exits, rows)

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> ChosenExit:
        first, _, last = (argument or "").partition("-")
        return cls(read_number(first), read_number(last))

    @property
    def spelling(self) -> str:
        return f"del:{self.earliest}-{self.latest}"


@dataclass
class Worth:
    """Holds an exit's trial results: tokens tried, how many of them would be accepted, and the cost of a step."""

    cost: float
    accepted: float = 0.0
    tokens: float = 0.0

    def count(self, chance: float, tokens: int) -> None:
        self.accepted = _MEMORY * self.accepted + chance * tokens
        self.tokens = _MEMORY * self.tokens + tokens


class ChosenExitProposer(LayerPathProposer):
    """Drafts from the chosen exit."""

    def __init__(self, exits: Sequence[EarlyExit], rows: RowsView) -> None:
        model, self._depth = rows.runner.model, rows.runner.depth
        super().__init__(exits[0], self._depth)
        adapter = find_adapter(model)
        self.chosen, self._worths = exits[0], {each: Worth(each.cost(model, adapter)) for each in exits}
        self._first_cost = self._worths[exits[0]].cost
        self._rounds, self._due, self._gap = 0, 0, 1
        # Which exit it leaves by may change.
        self.early_exit = None

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        draft = super().propose(rows, budget)
        if not draft.steps or self._rounds < self._due or rows.rows_apart:
            return draft
        tokens = max(_TOKENS // len(rows.running), 1)
        return replace(draft, behind=ExitTrial(tokens, rows.greedy, tuple(each.layer for each in self._worths)))

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        super().learn(rows, draft, target, verdict)
        self._rounds += draft.steps > 0
        chances = target.behind
        if not isinstance(draft.behind, ExitTrial) or not isinstance(chances, Tensor):
            return
        # The first token is behind the text; of the others, rejected ones are not part of it.
        read = [
            (place, token)
            for place, number in enumerate(rows.running)
            for token in range(chances.shape[1])
            if number in verdict.rows and list(verdict.rows[number].path[:token]) == [*range(token)]
        ]
        places, tokens = map(list, zip(*read, strict=True))
        means: list[float] = chances[places, tokens].mean(0).tolist()
        for worth, chance in zip(self._worths.values(), means[1:], strict=True):
            worth.count(chance, len(read))
        self._choose(rows)

    def _choose(self, rows: RowsView) -> None:
        # Acceptance rates are shrunk towards the mean of all exits.
        mean = sum(each.accepted for each in self._worths.values()) / sum(each.tokens for each in self._worths.values())

        def speed(exit: EarlyExit) -> float:
            worth = self._worths[exit]
            rate = (worth.accepted + _PRIOR * mean) / (worth.tokens + _PRIOR)
            return max(
                sum(rate**token for token in range(length + 1))
                / rows.controller.price(worth.cost / self._first_cost * length, length)
                for length in range(1, rows.controller.most.depth + 1)
            )

        best = max(self._worths, key=speed)
        stays = speed(best) < _CLEAR * speed(self.chosen)
        self._gap = min(2 * self._gap, _LONGEST) if stays else self._gap
        self._due = self._rounds + self._gap
        if not stays:
            self.chosen, self._path = best, best.path(self._depth)


@dataclass(frozen=True)
class ExitTrial(Behind):
    """Tries exits on the first `tokens` tokens of a block, whose states at each exit are exact.

    It adds no nodes. What comes of it are acceptance rates, `[rows, tokens, 1 + exits]`, the whole network's first.
    """

    tokens: int
    greedy: bool
    exits: tuple[int, ...]

    def tree(self, draft: Tree) -> Tree:
        return draft

    def run(self, request: PassRequest, tree: Tree, run: Callable[[PassRequest], PassResult]) -> PassResult:
        rows, width = request.tokens.shape
        result = run(replace(request, exits=self.exits))
        # What exits say lies in further rows.
        columns: Tensor = result.logits.unflatten(0, (1 + len(self.exits), -1)).movedim(0, -2)
        probs = columns[:, : self.tokens].float().softmax(-1)
        best = probs.argmax(-1)
        chances = (best == best[:, :, :1]).float() if self.greedy else torch.minimum(probs, probs[:, :, :1]).sum(-1)
        return replace(result.first(width, rows), behind=chances)
