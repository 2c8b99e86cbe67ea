"""Rows that have ended are run no more, and the others are what they would have been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.tiny import in_turns
from selfspec.draft import Drafter

ROWS, WIDTH, NEW = 6, 7, 24
LENGTHS = (4, 13, 1, 24, 10, 7)
DRAFTS: list[Drafter | None] = [
    None,
    selfspec.drafts.EarlyExit(2),
    selfspec.drafts.LayerSkip(mlp=[3]),
    selfspec.drafts.LowPrecision(4, layers=[2, 3]),
]

# Rows that have ended are padded where there is an end token; this one never comes.
NO_END: dict[str, Any] = {"eos_token_id": 49, "suppress_tokens": [49]}
OPTIONS: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.05}, {"no_repeat_ngram_size": 6}]


def ragged() -> dict[str, Any]:
    ids, mask = tiny.prompt(WIDTH, ROWS), torch.ones(ROWS, WIDTH, dtype=torch.long)
    for row, padding in enumerate((0, 3, 0, 5, 1, 0)):
        ids[row, :padding] = mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def batches(model: PreTrainedModel) -> list[int]:
    """Notes how many rows each pass over the embeddings reads."""
    seen: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[0]))
    return seen


def own_length(ids: Tensor, scores: Any) -> Tensor:
    """Ends each row at a length of its own."""
    return torch.tensor([ids.shape[1] >= WIDTH + length for length in LENGTHS])


@pytest.mark.parametrize(("architecture", "options", "draft"), in_turns(sorted(tiny.BUILDERS), OPTIONS, DRAFTS))
def test_greedy_rows_are_what_they_are_alone(architecture: str, draft: Drafter | None, options: dict[str, Any]) -> None:
    model = tiny.BUILDERS[architecture]()
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **NO_END, **options}
    wanted = model.generate(**ragged(), **options)
    options["stopping_criteria"] = [own_length]
    seen = batches(model)
    stream, run = selfspec.wrap(model, draft, draft_length=3).stream(**ragged(), **options), set()
    for chunk in stream:
        # Never as many ended rows as live ones.
        live = sum(bool(row.tokens) for row in chunk.rows)
        assert seen[-1] < 2 * live
        run.add(seen[-1])
    out = stream.output()
    assert out.lengths == LENGTHS
    for row, length in enumerate(LENGTHS):
        assert torch.equal(out.sequences[row, : WIDTH + length], wanted[row, : WIDTH + length])
    assert {1, ROWS} <= run


def test_a_cache_that_is_returned_keeps_all_its_rows(llama: PreTrainedModel) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "stopping_criteria": [own_length], **NO_END}
    seen = batches(llama)
    out = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=4).generate(
        **ragged(), return_dict_in_generate=True, **options
    )
    assert set(seen) == {ROWS}
    assert out.cache is not None
    assert out.cache.layers[0].keys.shape[0] == ROWS
