"""Trees of every drafter under every lossless rule, in batches whose rows differ: the exact joint of many samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import selfspec
from helpers.drafting import InLockstep, InTurns, Offering, _InLockstep
from helpers.goodness import holm_rejects
from helpers.joints import EOS, EQUALLY_LONG, PROMPTS, Text, Warp, drawn, joint, padded, small
from helpers.tiers import taking_turns
from selfspec.accept import Rule, find_rule
from selfspec.cache.tree import Tree
from selfspec.control import FixedLength
from selfspec.control.controller import Control, Controller
from selfspec.control.costs import CostsByRows
from selfspec.draft import (
    Assistant,
    Budget,
    Draft,
    Drafter,
    EarlyExit,
    LowPrecision,
    PromptLookup,
    Recycling,
    Suffixes,
    Union,
)

# Unlike the settings of other tests, one with a filter: p and q have zeros at other tokens.
WARPS = (Warp(temperature=1.2), Warp(temperature=0.7), Warp(temperature=1.4, top_k=4, top_p=0.9))


def _assistant() -> Assistant:
    model = small()
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator)
    return Assistant(model)


class ModelInLockstep(FixedLength):
    """Rows at one place stay there, and of a union the model drafts in every round."""

    def begin(self, costs: CostsByRows) -> Controller:
        return _ModelInLockstep(Budget(self.length, self.nodes or self.length))


class _ModelInLockstep(_InLockstep):
    def prefers(self, match: int, behind: Any) -> bool:
        return False


@dataclass
class Watched:
    """Judges as a rule does, and notes the trees of the drafts it is shown."""

    rule: Rule
    trees: set[Tree] = field(default_factory=set)

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    @property
    def couples(self) -> bool:
        return self.rule.couples

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        self.trees.add(draft.tree)
        return self.rule.accept_probs(draft, p, logits)

    def accepted(self, mask: Tensor, tree: Tree) -> Tensor:
        return self.rule.accepted(mask, tree)

    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        return self.rule.recovery_probs(draft, p, place)


def rejected(
    drafter: Drafter, rule: str, warp: Warp, control: Control, rows: int, calls: int, prompts: Sequence[Text] = PROMPTS
) -> list[str]:
    """The prompts whose samples do not follow their joint, of batches whose rows have both prompts and end apart."""
    model, watched = small(), Watched(find_rule(rule))
    spec = selfspec.wrap(model, drafter, draft_length=control, accept=watched)
    found = drawn(spec, prompts, rows=rows, batches=calls, eos_token_id=EOS, **warp.options)
    assert any(not tree.is_chain for tree in watched.trees)
    assert found.accepted > rows * calls / 10
    return holm_rejects(found.fits(partial(joint, model, warp=warp, eos=EOS)), 1e-3)


def test_rows_of_prompts_of_one_length_are_in_lockstep() -> None:
    def first(control: Control, prompts: Sequence[Text], seed: int) -> set[int]:
        spec = selfspec.wrap(small(), EarlyExit(1), draft_length=control)
        ids, mask = padded([torch.tensor([prompt]) for _ in range(4) for prompt in prompts])
        options: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0, "attention_mask": mask}
        return {len(row.tokens) for row in next(spec.stream(ids, seed=seed, **options, **WARPS[1].options)).rows}

    assert all(len(first(InLockstep(2, nodes=5), EQUALLY_LONG, seed)) == 1 for seed in range(5))
    # Rows of other prompts, or under another control, do not stay together.
    assert any(len(first(InLockstep(2, nodes=5), PROMPTS, seed)) > 1 for seed in range(5))
    assert any(len(first(InTurns(2, nodes=5), EQUALLY_LONG, seed)) > 1 for seed in range(5))


UNIONS: dict[str, Any] = {
    # Where a row of the first prompt draws all that it is offered, there is room beside first tokens of the second.
    "offers+exit": lambda: Union(Offering([{(3,): 0.98, (3, 3): 0.98}, {(3,): 0.4}]), EarlyExit(1)),
    "suffix+int8": lambda: Union(Suffixes(), LowPrecision(8)),
    "recycle+assistant": lambda: Union(Recycling(candidates=3), _assistant()),
    "lookup+suffix+recycle": lambda: Union(PromptLookup(), Suffixes(), Recycling(candidates=3)),
}


@pytest.mark.statistical
@pytest.mark.parametrize(("draft", "rule"), taking_turns(list(UNIONS), ("token", "block")))
def test_samples_of_unions_in_lockstep_follow_the_exact_joint(draft: str, rule: str) -> None:
    # What one other row accepts of a model's draft says most.
    kind, rows = (ModelInLockstep, 2) if draft == "offers+exit" else (InLockstep, 16)
    control, warp = kind(2, nodes=3), Warp(temperature=0.5)
    assert rejected(UNIONS[draft](), rule, warp, control, rows, 20_480 // rows, EQUALLY_LONG) == []
