"""Cascades: the source in front drafts where that is worth more than the drafts that it displaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import selfspec
from helpers import tiny
from selfspec.draft import Budget, Cascade, Draft, Drafter, FreeProposer, Proposer, RowsView, Stateless


@dataclass(frozen=True)
class Guessing(Drafter):
    """Says always the same, for nothing, and seems to have found it."""

    token: int

    def begin(self, rows: RowsView) -> Proposer:
        return _Guesses(self.token)


class _Guesses(FreeProposer):
    def __init__(self, token: int) -> None:
        self._token = token

    def look_up(self, rows: RowsView, budget: Budget) -> Draft:
        tokens = torch.full((len(rows.running), budget.depth), self._token)
        return Draft.chain(tokens, match_length=3)


@dataclass(frozen=True, eq=False)
class Knowing(Stateless):
    """Knows the text of each row, and runs a model to say it."""

    text: Tensor
    runs = "model"

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        starts = [rows.text_length(row) for row in rows.running]
        tokens = [
            self.text[row, start:][: budget.depth].tolist() for row, start in zip(rows.running, starts, strict=True)
        ]
        filled = [each + [0] * (budget.depth - len(each)) for each in tokens]
        return Draft.chain(torch.tensor(filled), steps=budget.depth)

    def cost(self, model: Any, adapter: Any) -> float:
        return 0.1


@pytest.mark.parametrize("sampled", [False, True])
def test_a_guess_displaces_no_better_draft_for_long(sampled: bool) -> None:
    model, ids = tiny.llama(), tiny.prompt(5, 2)
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": sampled, "eos_token_id": None, "seed": 3}
    if sampled:
        options |= {"temperature": 0.9, "top_k": None}
    text = selfspec.wrap(model).generate(ids, accept="coupled", **options).sequences
    never = next(token for token in range(tiny.VOCABULARY) if token not in set(text.flatten().tolist()))
    spec = selfspec.wrap(model, Cascade(Guessing(never), Knowing(text)), draft_length=3)
    out = spec.generate(ids, accept="coupled", **options)
    assert torch.equal(out.sequences, text)
    # Four rounds of guesses, and then whole drafts.
    assert out.stats.rounds <= 4 + -(-56 // 4) + 1


def test_each_row_learns_by_itself_where_rows_are_apart() -> None:
    model = tiny.llama()
    ids = tiny.prompt(5, 3)
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None, "do_sample": True, "top_k": None, "seed": 1}
    spec = selfspec.wrap(model, Cascade(Guessing(7), selfspec.drafts.EarlyExit(2)), draft_length=3)
    together = spec.generate(ids, **options).sequences
    alone = spec.generate(ids[:1], **options).sequences
    assert torch.equal(together[0], alone[0])


@pytest.mark.parametrize("sampled", [False, True])
def test_sources_without_a_model_alone_have_nothing_to_displace(sampled: bool) -> None:
    spec = selfspec.wrap(tiny.llama(), Cascade(Guessing(7), selfspec.drafts.Suffixes()), draft_length=3)
    out = spec.generate(tiny.prompt(5), max_new_tokens=40, do_sample=sampled, eos_token_id=None, seed=0)
    assert out.stats.drafted
