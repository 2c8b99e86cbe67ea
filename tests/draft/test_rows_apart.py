"""Rows that draft from sources of their own, side by side: what each is given, and the exact joint of samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.accept import find_rule
from selfspec.draft import Cascade, Draft, Drafter, EarlyExit, PromptLookup, Recycling, Suffixes
from selfspec.draft.union import likeliest_path


def watched(spec: selfspec.SelfSpeculative, rule: str) -> list[Draft]:
    """Have the wrapper judge by a rule, and note what it is shown."""
    drafts: list[Draft] = []

    class Watched(type(find_rule(rule))):  # type: ignore[misc]
        def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
            drafts.append(draft)
            found: Tensor = super().accept_probs(draft, p, logits)
            return found

    spec.rule = Watched()
    return drafts


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rows_with_a_match_take_it_and_others_what_the_model_drafts(llama: PreTrainedModel, rule: str) -> None:
    # The text of the first row comes again; that of the second never did.
    ids = torch.tensor([[5, 6, 7, 8, 5, 6], [11, 12, 13, 14, 15, 16]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": None, "seed": 0}
    spec = selfspec.wrap(llama, Cascade(PromptLookup(shortest=2), EarlyExit(2)), draft_length=3)
    drafts = watched(spec, rule)
    next(spec.stream(ids, **options))
    (draft,) = drafts
    assert draft.tokens[0].tolist() == [7, 8, 5]
    assert draft.probs is not None
    assert torch.equal(draft.probs[0], torch.nn.functional.one_hot(draft.tokens[0], tiny.VOCABULARY).to(draft.probs))
    assert float(draft.probs[1].amax()) < 1
    alone = watched(exits := selfspec.wrap(llama, EarlyExit(2), draft_length=3), rule)
    next(exits.stream(ids, **options))
    assert torch.equal(draft.tokens[1], alone[0].tokens[1])


def test_the_likeliest_path_takes_the_likeliest_token_at_each_place() -> None:
    reach = {(1,): 0.4, (2,): 0.5, (1, 3): 0.39, (2, 4): 0.1, (2, 5): 0.2, (2, 5, 6): 0.1}
    assert likeliest_path(reach, 3) == (2, 5, 6)
    assert likeliest_path(reach, 2) == (2, 5)
    assert likeliest_path({}, 3) == ()


def test_trust_is_a_rows_own_where_rows_are_apart() -> None:
    rows: Any = SimpleNamespace(size=2, memories={}, rows_apart=True, source=lambda row: [])
    apart = Suffixes().begin(rows)
    rows.rows_apart = False
    together = Suffixes().begin(rows)
    assert apart.trust(0) is apart.trust(0) is not apart.trust(1)
    assert together.trust(0) is together.trust(1)


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
