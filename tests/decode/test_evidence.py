"""What a prompt shows of a draft before the first round, and what the default control makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.control import Controller, Evidence
from selfspec.control.cost_aware import CostAware, CostAwareController
from selfspec.draft import Drafter

NEW = 64


def seen(monkeypatch: pytest.MonkeyPatch) -> list[Evidence]:
    """Every evidence that the default control is given from now on."""
    noted: list[Evidence] = []
    learn = CostAwareController.learn_prompt

    def note(self: Any, evidence: Evidence) -> None:
        noted.append(evidence)
        learn(self, evidence)

    monkeypatch.setattr(CostAwareController, "learn_prompt", note)
    return noted


@torch.no_grad()
def by_hand(model: PreTrainedModel, ids: torch.Tensor, layer: int, temperature: float) -> Evidence:
    output = model(ids[:, :-1], output_hidden_states=True)
    target = output.logits[:, -32:].float() / temperature
    left = model.lm_head(model.model.norm(output.hidden_states[layer]))[:, -32:].float() / temperature
    q = left.softmax(-1)
    chances = torch.minimum(q, target.softmax(-1)).sum(-1)
    return Evidence(tuple(q.amax(-1).flatten().tolist()), tuple(chances.flatten().tolist()))


@pytest.mark.parametrize(
    "draft",
    [
        selfspec.drafts.EarlyExit(2),
        selfspec.drafts.Cascade(selfspec.drafts.PromptLookup(), selfspec.drafts.EarlyExit(2)),
    ],
)
@pytest.mark.parametrize(("width", "rows"), [(9, 1), (40, 1), (12, 3)])
def test_evidence_is_the_exit_beside_the_target(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, draft: Drafter, width: int, rows: int
) -> None:
    noted = seen(monkeypatch)
    ids = tiny.prompt(width, rows)
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 0}
    selfspec.wrap(llama, draft).generate(ids, max_new_tokens=64, seed=0, **options)
    wanted = by_hand(llama, ids, 2, 0.7)
    assert len(noted) == 1
    assert noted[0].chances == pytest.approx(wanted.chances, abs=1e-5)
    assert noted[0].confidences == pytest.approx(wanted.confidences, abs=1e-5)


def test_a_head_of_a_reduced_vocabulary_is_judged_too(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = seen(monkeypatch)
    draft = selfspec.drafts.ReducedVocabulary(selfspec.drafts.EarlyExit(2), tuple(range(0, 50, 2)))
    ids = tiny.prompt(40)
    wanted = llama.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    out = selfspec.wrap(llama, draft).generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert torch.equal(out.sequences, wanted)
    assert len(noted[0].chances) == 32


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        (None, {}),
        (selfspec.drafts.LayerSkip(mlp=[1]), {}),
        (selfspec.drafts.LowPrecision(8), {}),
        (selfspec.drafts.LowPrecision(8, fewer=selfspec.drafts.EarlyExit(2)), {}),
        (selfspec.drafts.PromptLookup(), {}),
        (selfspec.drafts.EarlyExit(2), {"draft_length": 3}),
        (selfspec.drafts.EarlyExit(2), {"repetition_penalty": 1.2}),
        (selfspec.drafts.EarlyExit(2), {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])}),
    ],
)
def test_nothing_is_looked_at_where_it_would_cost_more(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, draft: Drafter | None, options: dict[str, Any]
) -> None:
    noted = seen(monkeypatch)
    monkeypatch.setattr(Controller, "learn_prompt", lambda self, evidence: noted.append(evidence))
    ids = tiny.prompt(9, 2)
    selfspec.wrap(llama, draft).generate(ids, max_new_tokens=4, do_sample=False, **options)
    assert noted == []


def test_a_draft_that_is_worth_nothing_on_the_prompt_is_not_tried_in_a_short_text(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(1))
    out = spec.generate(tiny.prompt(30), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert out.stats.drafted == 0
    # Without a prompt to go by it is tried, and given up.
    cost = selfspec.drafts.EarlyExit(1).cost(llama, spec.adapter)
    cheap = CostAware(costs=selfspec.Costs.assumed(cost, llama.device))
    out = spec.generate(tiny.prompt(3), max_new_tokens=NEW, do_sample=False, eos_token_id=None, draft_length=cheap)
    assert 0 < out.stats.drafted < 9


def test_a_draft_that_is_good_on_the_prompt_drafts_from_the_first_round(llama: PreTrainedModel) -> None:
    cheap = selfspec.Costs(draft=0.3)
    spec = selfspec.wrap(
        tiny.as_good_as_the_target(), selfspec.drafts.EarlyExit(3), draft_length=CostAware(costs=cheap)
    )
    for sampled in (False, True):
        out = spec.generate(tiny.prompt(20), max_new_tokens=40, do_sample=sampled, seed=1, eos_token_id=None)
        assert out.stats.acceptance_rate == 1
        assert out.stats.mean_accepted_length > 2.5
