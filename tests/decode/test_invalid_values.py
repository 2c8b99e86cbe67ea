"""`remove_invalid_values`: logits that are not finite are replaced as in `transformers`, and end no row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import assert_alike
from selfspec.draft import Drafter

GREEDY: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
DRAFTS: list[Drafter | None] = [
    None,
    selfspec.drafts.EarlyExit(2),
    selfspec.drafts.LowPrecision(4, layers=[2, 3]),
    selfspec.drafts.PromptLookup(shortest=1),
    selfspec.drafts.Cascade(selfspec.drafts.PromptLookup(), selfspec.drafts.EarlyExit(2)),
]
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]])


@pytest.fixture
def broken(llama: PreTrainedModel) -> PreTrainedModel:
    """One token's logit is never a number, another's is infinite, of a sign that goes with the text."""
    weight = llama.get_output_embeddings().weight.data
    weight[7] = torch.nan
    weight[9] = 0.0
    weight[9, 0] = 1e39
    return llama


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_text_is_that_of_transformers(broken: PreTrainedModel, draft: Drafter | None) -> None:
    options = {"attention_mask": MASK, "remove_invalid_values": True, **GREEDY}
    found = assert_alike(selfspec.wrap(broken, draft, draft_length=3), inputs=tiny.prompt(7, 3), **options)
    new = found[:, 7:]
    assert 0 < (new == 9).sum() < new.numel()


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_scores_and_logits_are_those_of_transformers(broken: PreTrainedModel, draft: Drafter | None) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options = {"remove_invalid_values": True, "repetition_penalty": 1.3, **asked, **GREEDY}
    stock = broken.generate(tiny.prompt(7), **options)
    out = selfspec.wrap(broken, draft, draft_length=3).generate(tiny.prompt(7), **options)
    assert out.scores is not None
    assert out.logits is not None
    torch.testing.assert_close(torch.stack(out.scores), torch.stack(stock.scores))
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(stock.logits), equal_nan=True)


def test_the_models_own_config_may_ask_for_it(broken: PreTrainedModel) -> None:
    broken.generation_config.remove_invalid_values = True
    spec = selfspec.wrap(broken, selfspec.drafts.EarlyExit(2), draft_length=3)
    assert torch.equal(spec.generate(tiny.prompt(7), **GREEDY).sequences, broken.generate(tiny.prompt(7), **GREEDY))


def test_finite_logits_are_left_alone(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=3)
    for options in ({"do_sample": False}, {"do_sample": True, "seed": 3}):
        wanted = spec.generate(tiny.prompt(7), max_new_tokens=14, **options).sequences
        found = spec.generate(tiny.prompt(7), max_new_tokens=14, remove_invalid_values=True, **options).sequences
        assert torch.equal(found, wanted)


def test_without_it_rows_end_as_before(broken: PreTrainedModel) -> None:
    spec = selfspec.wrap(broken, selfspec.drafts.EarlyExit(2), draft_length=3)
    with pytest.raises(selfspec.errors.NonFiniteLogitsError):
        spec.generate(tiny.prompt(7), **GREEDY)
