"""What tests of drafts share: the stock text, drafters and controls that do as they are told, altered drafts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.cache.tree import Tree
from selfspec.control import FixedLength
from selfspec.control.controller import Controller
from selfspec.control.costs import CostsByRows
from selfspec.draft import Budget, Draft, Drafter, Proposer, RowsView, Stateless
from selfspec.draft.draft import RowVerdict

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def stock(model: PreTrainedModel, ids: Tensor, new: int) -> Tensor:
    """What `model.generate` writes greedily after prompts."""
    found: Tensor = model.generate(ids, max_new_tokens=new, **GREEDY)
    return found


def rounds_of(spec: selfspec.SelfSpeculative, ids: Tensor, new: int) -> list[Any]:
    """Return the tokens that one row drafts and commits in each round of a greedy text."""
    return [chunk.rows[0] for chunk in spec.stream(ids, max_new_tokens=new, do_sample=False)]


def outcome(judged: int, accepted: int, committed: int, dropped: int = 0) -> RowVerdict:
    """What a row commits of a chain, and what lockstep drops."""
    return RowVerdict([0] * (accepted + 1), range(accepted), judged, [0] * committed, dropped)


def assert_alike(spec: selfspec.SelfSpeculative, **options: Any) -> Tensor:
    """Both ways of a wrapper give the text of its model, which is returned."""
    wanted: Tensor = spec.model.generate(**options)
    assert torch.equal(spec.generate(**options).sequences, wanted)
    assert torch.equal(spec.model.generate(**options, custom_generate=spec), wanted)
    return wanted


class Remembering(LogitsProcessor):
    """Changes nothing, and does not say that it has no memory."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores


@dataclass(frozen=True)
class Oracle(Stateless):
    """Drafts a text: one child of each place says its next token, which of them changes; the others say another."""

    tree: Tree
    texts: Tensor

    def propose(self, batch: Any, budget: Budget) -> Draft:
        tree = Tree(self.tree.parents[: budget.nodes])
        rows = []
        for row in batch.running:
            start, tokens = len(batch.committed[row]), []
            for node, path in enumerate(tree.paths):
                siblings = tree.children[tree.parents[node] + 1]
                right = siblings[(start + row) % len(siblings)] == node
                place = min(start + len(path) - 1, self.texts.shape[1] - 1)
                tokens.append((int(self.texts[row, place]) + (0 if right else node + 1)) % tiny.VOCABULARY)
            rows.append(tokens)
        return Draft(torch.tensor(rows), tree)


class Told(FixedLength):
    """Drafts of one length, under a controller of its own."""

    controller: ClassVar[type[Controller]] = Controller

    def begin(self, costs: CostsByRows) -> Controller:
        return self.controller(Budget(self.length, self.nodes or self.length))


class ByModel(Controller):
    def prefers(self, match: int, behind: Any) -> bool:
        return False


class ModelDrafts(Told):
    controller = ByModel


class _InTurns(Controller):
    asked = 0

    def prefers(self, match: int, behind: Any) -> bool:
        self.asked += 1
        return self.asked % 3 > 0


class InTurns(Told):
    """Every source of a cascade drafts in some rounds, whatever it promises."""

    controller = _InTurns


class _InLockstep(_InTurns):
    def keeps_lockstep(self) -> bool:
        return True


class InLockstep(Told):
    """Rows at one place stay there."""

    controller = _InLockstep


def near(model: PreTrainedModel, noise: float = 0.05) -> PreTrainedModel:
    """The same model with noise on its weights: it agrees with it often, and not always."""
    other = deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for weight in other.parameters():
        weight.data += noise * weight.std() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return other


Propose = Callable[[Any, Budget], Draft]
Altering = Callable[[Propose, Any, Budget], Draft]
"""Makes a draft: takes what another proposer does, the rows, and the budget."""


@dataclass(frozen=True, eq=False)
class Altered(Drafter):
    """Drafts as a function makes of another drafter's proposals."""

    drafter: Drafter
    alter: Altering

    def begin(self, rows: RowsView) -> Proposer:
        return _Altered(self.drafter.begin(rows), self.alter)

    def check(self, depth: int) -> None:
        self.drafter.check(depth)

    def check_model(self, *given: Any) -> None:
        self.drafter.check_model(*given)

    def cost(self, *given: Any) -> float:
        return self.drafter.cost(*given)


class _Altered(Proposer):
    def __init__(self, inner: Proposer, alter: Altering) -> None:
        self._inner, self._alter = inner, alter

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return self._alter(self._inner.propose, rows, budget)

    def learn(self, *given: Any) -> None:
        self._inner.learn(*given)


def poisoning(
    model: PreTrainedModel,
    drafter: Drafter,
    text: Tensor,
    rows: slice = slice(None),
    rounds: Container[int] = range(1, 10**6),
) -> Altered:
    """Let the last token of a draft be one that the text has not, and whose embedding becomes NaN."""
    poison = next(token for token in range(tiny.VOCABULARY) if token not in text)
    model.get_input_embeddings().weight.data[poison] = torch.nan
    number = itertools.count(1)

    def spoil(propose: Propose, batch: Any, budget: Budget) -> Draft:
        made = propose(batch, budget)
        if next(number) in rounds:
            made.tokens[rows, -1] = poison
        return made

    return Altered(drafter, spoil)
