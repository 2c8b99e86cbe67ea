"""Token recycling: trees of candidates that earlier passes left, kept over calls of one wrapper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import stock
from selfspec.cache.tree import Tree
from selfspec.draft import Recycling
from selfspec.draft.recycling import NONE, RecyclingMemory, contexts_of
from selfspec.draft.registry import draft_name, parse_draft


def test_what_was_seen_once_is_drafted_at_once_by_this_wrapper_alone(llama: PreTrainedModel) -> None:
    # Without attention the next token depends on the last one alone.
    for layer in llama.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    spec, ids = selfspec.wrap(llama, "recycle", draft_length=7), tiny.prompt(9)
    first, again = (spec.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=None) for _ in range(2))
    assert torch.equal(first.sequences, again.sequences)
    assert again.stats.mean_accepted_length > max(2.0, first.stats.mean_accepted_length)
    other = selfspec.wrap(llama, "recycle", draft_length=7).generate(
        ids, max_new_tokens=32, do_sample=False, eos_token_id=None
    )
    assert other.stats.rounds == first.stats.rounds


def test_the_draft_has_branches_and_prompts_are_learnt(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, Recycling(candidates=3), draft_length=5)
    chunks = spec.stream(torch.tensor([[5, 9, 5, 7, 5]]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    # 7 and 9 have followed 5, 7 last; 5 has followed both.
    assert set(next(chunks).rows[0].draft) >= {7, 5}
    assert spec.generate(tiny.prompt(9), max_new_tokens=24, do_sample=False, eos_token_id=None).stats.judged_per_depth


def test_a_tree_grows_from_the_candidates_of_each_node() -> None:
    memory = RecyclingMemory(2, 1, 1 << 16)
    memory.table.learn(np.array([[1], [2], [3]]), np.array([[2, 3], [4, 5], [6, 7]]))
    # Two children, two of the first and one of the second; nothing is known after 4.
    tree = Tree((-1, -1, 0, 0, 1, 2))
    grown = memory.table.grown(np.array([[1], [3]]), tree)
    assert grown.tolist() == [[2, 3, 4, 5, 6, 4], [6, 7, 6, 6, 7, 6]]


def test_the_longest_known_context_of_each_node_decides() -> None:
    memory = RecyclingMemory(2, 2, 1 << 16)
    memory.table.learn(np.array([[9, 1], [9, 2], [1, 2]]), np.array([[2, 3], [4, 5], [6, 7]]))
    tree = Tree((-1, -1, 0, 1))
    # After 9 1 come 2 and 3; after 1 2 comes 6. Of 8 1 the 1 alone is known, and nothing of 3.
    assert memory.table.grown(np.array([[9, 1], [8, 1]]), tree).tolist() == [[2, 3, 6, 3]] * 2
    assert memory.table.find(np.array([[9, 1], [8, 1], [1, 5]])).lengths.tolist() == [2, 1, 0]


def test_every_node_is_learnt_after_its_own_ancestors() -> None:
    ends = contexts_of(np.array([[7, 8, 9]]), np.array([[1, 2, 3, 4]]), Tree((-1, -1, 0, 2)))
    assert ends.tolist() == [[[7, 8, 9], [8, 9, 1], [8, 9, 2], [9, 1, 3], [1, 3, 4]]]


def test_sources_of_a_cascade_learn_from_rounds_of_the_others(llama: PreTrainedModel) -> None:
    draft = selfspec.drafts.Cascade(
        selfspec.drafts.PromptLookup(1, 3), selfspec.drafts.Cascade(Recycling(), selfspec.drafts.EarlyExit(2))
    )
    spec, ids = selfspec.wrap(llama, draft, draft_length=5), tiny.prompt(9, 2)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    first, again = (spec.generate(ids, **options) for _ in range(2))
    assert torch.equal(first.sequences, stock(llama, ids, 40))
    assert torch.equal(first.sequences, again.sequences)
    assert 0 < first.stats.draft_bytes <= again.stats.draft_bytes
    assert draft_name(selfspec.drafts.Cascade(Recycling(), selfspec.drafts.EarlyExit(2))) == "recycle+exit:2"
    # What followed each token is known, though an early exit drafted it.
    (memory,) = spec._memories.values()
    assert isinstance(memory, RecyclingMemory)
    contexts = np.array([[NONE, NONE, NONE, token] for token in first.sequences[:, 9:-1].flatten().tolist()])
    assert (memory.table.find(contexts).lengths > 0).all()


def test_chances_of_ranks_are_those_after_contexts_of_one_length(llama: PreTrainedModel) -> None:
    spec, ids = selfspec.wrap(llama, Recycling(longest=2), draft_length=5), tiny.prompt(9)
    generation = spec.stream(ids, max_new_tokens=32, do_sample=False, eos_token_id=None)
    list(generation)
    (memory,) = spec._memories.values()
    assert isinstance(memory, RecyclingMemory)
    assert len({chances.rates() for chances in memory.chances}) == 2


def test_names() -> None:
    assert parse_draft("recycle") == Recycling()
    assert draft_name(Recycling()) == "recycle"


@pytest.mark.parametrize(
    ("name", "bounds"), [("candidates", "1 to 64"), ("longest", "1 to 16"), ("most_bytes", "8192 to")]
)
@pytest.mark.parametrize("given", [0, -1, 1 << 41, 2.0, True, "8"])
def test_numbers_out_of_range_are_refused(name: str, bounds: str, given: Any) -> None:
    with pytest.raises(selfspec.errors.DraftConfigError, match=f"{name} must be an integer from {bounds}"):
        Recycling(**{name: given})
