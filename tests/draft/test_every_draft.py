"""What holds for every drafter: the text is the model's own in every row and call, whatever was learnt before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import GREEDY, ModelDrafts, Remembering, near, stock
from selfspec.control import CostAware, FixedLength
from selfspec.draft import Assistant, Drafter, EarlyExit, Recycling, Suffixes, Union

CONTROLS = (FixedLength(3, nodes=7), ModelDrafts(2, nodes=7), CostAware(3, nodes=7))
FREE, WITH_A_MODEL = Union(Suffixes(), Recycling()), Union(Suffixes(), Recycling(), EarlyExit(1))
CASES: list[tuple[Drafter, Any]] = [(Recycling(), 7), (Suffixes(), 7)]
CASES += [(draft, control) for draft in (FREE, WITH_A_MODEL) for control in CONTROLS]


@pytest.mark.parametrize(("draft", "control"), CASES, ids=str)
def test_greedy_text_is_stock_text_in_every_row_and_call(architecture: str, draft: Drafter, control: Any) -> None:
    model = tiny.BUILDERS[architecture]().double()
    spec = selfspec.wrap(model, draft, draft_length=control)
    for seed, rows in ((0, 1), (1, 3), (0, 1)):
        ids = tiny.prompt(9, rows, seed).clamp(min=1)
        assert torch.equal(spec.generate(ids, max_new_tokens=24, **GREEDY).sequences, stock(model, ids, 24))


@pytest.mark.parametrize("name", ["recycle", "suffix", "union", "assistant"])
def test_coupled_samples_are_those_of_plain_decoding_whatever_was_learnt(llama: PreTrainedModel, name: str) -> None:
    made: dict[str, Drafter] = {"union": WITH_A_MODEL, "assistant": Assistant(near(llama))}
    control = ModelDrafts(2, nodes=7) if name == "union" else 7
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "eos_token_id": None, "seed": 3}
    plain = selfspec.wrap(llama, None, accept="coupled").generate(tiny.prompt(9, 2), **options)
    spec = selfspec.wrap(llama, made.get(name, name), accept="coupled", draft_length=control)
    for _ in range(2):
        assert torch.equal(spec.generate(tiny.prompt(9, 2), **options).sequences, plain.sequences)


@pytest.mark.parametrize("draft", ["recycle", "suffix"])
def test_processors_with_memory_get_a_chain(llama: PreTrainedModel, draft: str) -> None:
    spec, ids = selfspec.wrap(llama, draft, draft_length=5), tiny.prompt(9)
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList([Remembering()]), "max_new_tokens": 32}
    for _ in range(2):
        output = spec.generate(ids, **GREEDY, **options)
        assert torch.equal(output.sequences, stock(llama, ids, 32))
    assert output.stats.accepted > 0
