"""Cascades: what was found displaces no better draft for long, and rows take what each finds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import Oracle
from selfspec.cache.tree import Tree
from selfspec.draft import (
    Budget,
    Cascade,
    Draft,
    Drafter,
    FreeProposer,
    PromptLookup,
    Recycling,
    RowsView,
    Stateless,
    Suffixes,
)


@dataclass(frozen=True)
class Guessing(Stateless, FreeProposer):
    """Says always the same, for nothing, and seems to have found it."""

    token: int

    def look_up(self, rows: RowsView, budget: Budget) -> Draft:
        tokens = torch.full((len(rows.running), budget.depth), self.token)
        return Draft.chain(tokens, match_length=3)


class Knowing(Oracle):
    """Runs a model to say the text that it knows."""

    runs = "model"

    def propose(self, batch: Any, budget: Budget) -> Draft:
        return replace(super().propose(batch, budget), steps=budget.depth)

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
    spec = selfspec.wrap(model, Cascade(Guessing(never), Knowing(Tree.chain(3), text[:, 5:])), draft_length=3)
    out = spec.generate(ids, accept="coupled", **options)
    assert torch.equal(out.sequences, text)
    # Four rounds of guesses, and then whole drafts.
    assert out.stats.rounds <= 4 + -(-56 // 4) + 1


@pytest.mark.parametrize("draft", [PromptLookup(shortest=1), Suffixes(), Recycling()], ids=repr)
def test_nothing_is_found_in_padding(llama: PreTrainedModel, draft: Drafter) -> None:
    # Were it text, the last token would have stood before, with others after it.
    ids = torch.tensor([[14, 20, 21, 11, 12, 13, 14], [5, 6, 7, 8, 9, 5, 6]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
    spec = selfspec.wrap(llama, draft, draft_length=3)
    for asked, length in (((0,), 0), ((1,), 3)):
        rows = list(asked)
        options: dict[str, Any] = {"attention_mask": mask[rows], "do_sample": False, "max_new_tokens": 9}
        spec.forget()
        assert len(next(spec.stream(ids[rows], **options)).rows[0].draft) == length
