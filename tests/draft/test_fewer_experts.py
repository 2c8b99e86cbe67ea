"""Drafts with fewer experts: greedy text and joints are the target's; what has no experts to leave out is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import GREEDY, stock
from helpers.shrunken import shrunken
from selfspec.draft import EarlyExit, FewerExperts, LowPrecision, PromptLookup
from selfspec.draft.registry import draft_name, parse_draft
from selfspec.errors import DraftConfigError

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
DRAFTS = {"alone": FewerExperts(), "int8": FewerExperts(LowPrecision()), "exit": FewerExperts(EarlyExit(3))}


@pytest.mark.parametrize(("family", "draft", "nodes"), [*zip(FAMILIES, (*DRAFTS, "alone"), (3, 7, 3, 7), strict=True)])
def test_greedy_text_is_stock_text(family: str, draft: str, nodes: int) -> None:
    model = shrunken(family).double()
    spec = selfspec.wrap(model, DRAFTS[draft], draft_length=selfspec.FixedLength(3, nodes=nodes))
    for rows in (1, 3):
        ids = tiny.prompt(12, rows).clamp(min=3)
        output = spec.generate(ids, max_new_tokens=16, **GREEDY)
        assert torch.equal(output.sequences, stock(model, ids, 16))
        assert output.stats.drafted > 0


def test_it_is_written_before_other_drafts() -> None:
    for name in ("experts:1", "experts:1+int8", "experts:2+exit:3", "lookup+experts:1+int8", "experts:1+int8+kv4"):
        assert draft_name(parse_draft(name)) == name
    found = parse_draft("experts:1+int8")
    assert isinstance(found, FewerExperts)
    assert (found.most, found.bits) == (1, 8)
    path = found.path(4)
    assert path.experts == 1
    assert path.copy is not None
    assert path.resume_point is None


@pytest.mark.parametrize("name", ["experts", "experts:0", "experts:-1", "experts:x"])
def test_what_is_written_otherwise_is_refused(name: str) -> None:
    with pytest.raises(DraftConfigError, match="experts"):
        parse_draft(name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FewerExperts(most=0),
        lambda: FewerExperts(most=True),
        lambda: FewerExperts(PromptLookup()),  # type: ignore[arg-type]
        lambda: FewerExperts(FewerExperts(LowPrecision())).path(4),
    ],
)
def test_values_that_name_no_experts_are_refused(make: Any) -> None:
    with pytest.raises(DraftConfigError):
        make()


def test_models_with_nothing_to_leave_out_are_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(DraftConfigError, match="has no routed experts"):
        selfspec.wrap(llama, "experts:1")
    with pytest.raises(DraftConfigError, match="sends each token to 2 experts"):
        selfspec.wrap(shrunken("mixtral"), "experts:2")


def test_it_costs_what_it_reads() -> None:
    model = shrunken("mixtral")
    adapter = selfspec.wrap(model).adapter
    assert FewerExperts().cost(model, adapter) < 1
    assert FewerExperts(LowPrecision()).cost(model, adapter) < LowPrecision().cost(model, adapter)
