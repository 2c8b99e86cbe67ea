"""Token recycling: trees of candidates that earlier passes left, kept over calls of one wrapper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import GREEDY, Remembering, stock
from selfspec.cache.tree import Tree
from selfspec.draft import Recycling
from selfspec.draft.recycling import NONE, CandidateTable, RecyclingMemory, contexts_of
from selfspec.draft.registry import draft_name


def test_what_was_seen_once_is_drafted_at_once_by_this_wrapper_alone(llama: PreTrainedModel) -> None:
    # Without attention the next token depends on the last one alone.
    for layer in llama.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    spec, ids = selfspec.wrap(llama, "recycle", draft_length=7), tiny.prompt(9)
    first, again = (spec.generate(ids, max_new_tokens=32, **GREEDY) for _ in range(2))
    assert torch.equal(first.sequences, again.sequences)
    assert again.stats.mean_accepted_length > max(2.0, first.stats.mean_accepted_length)
    other = selfspec.wrap(llama, "recycle", draft_length=7).generate(ids, max_new_tokens=32, **GREEDY)
    assert other.stats.rounds == first.stats.rounds


def test_the_draft_has_branches_and_prompts_are_learnt(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, Recycling(candidates=3), draft_length=5)
    chunks = spec.stream(torch.tensor([[5, 9, 5, 7, 5]]), max_new_tokens=16, **GREEDY)
    # 7 and 9 have followed 5, 7 last; 5 has followed both.
    assert set(next(chunks).rows[0].draft) >= {7, 5}
    assert spec.generate(tiny.prompt(9), max_new_tokens=24, **GREEDY).stats.judged_per_depth


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
    first, again = (spec.generate(ids, max_new_tokens=40, **GREEDY) for _ in range(2))
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
    generation = spec.stream(ids, max_new_tokens=32, **GREEDY)
    list(generation)
    (memory,) = spec._memories.values()
    assert isinstance(memory, RecyclingMemory)
    assert len({chances.rates() for chances in memory.chances}) == 2


def listed(tokens: list[int], longest: int, kept: int) -> dict[tuple[int, ...], list[int]]:
    """What followed each context, the latest first."""
    found: dict[tuple[int, ...], list[int]] = {}
    padded = [*[NONE] * longest, *tokens]
    for end in range(longest + 1, len(padded)):
        for length in range(1, longest + 1):
            row = found.setdefault(tuple(padded[end - length : end]), [])
            row[:] = [padded[end], *(token for token in row if token != padded[end])][:kept]
    return found


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 3), st.integers(1, 6))
def test_a_text_is_learnt_as_if_token_by_token(tokens: list[int], longest: int, kept: int) -> None:
    table = CandidateTable(kept, longest, 1 << 20)
    table.learn_text(tokens)
    known = listed(tokens, longest, kept)
    for end in range(1, len(tokens) + 1):
        context = [*[NONE] * longest, *tokens[:end]][-longest:]
        found = table.find(np.array([context]))
        lengths = [length for length in range(1, longest + 1) if tuple(context[-length:]) in known]
        assert found.lengths.tolist() == [max(lengths, default=0)]
        wanted = known[tuple(context[-lengths[-1] :])] if lengths else []
        assert found.candidates[0].tolist() == [*wanted, *[NONE] * (kept - len(wanted))]


def test_it_takes_no_more_than_its_bytes() -> None:
    table, random = CandidateTable(8, 3, 5000), np.random.default_rng(0)
    for _ in range(20):
        contexts = random.integers(0, 10**6, (64, 3))
        table.learn(contexts, random.integers(0, 10**6, (64, 8)))
        # What was learnt last is there.
        assert table.find(contexts[-1:]).lengths == 3
    assert 0 < table.nbytes <= 5000


def test_a_context_that_lost_its_place_is_not_known_by_the_candidates_of_another() -> None:
    table = CandidateTable(2, 1, 16)
    table.learn(np.array([[1]]), np.array([[5, 8]]))
    table.learn(np.array([[2]]), np.array([[6, 9]]))
    found = table.find(np.array([[1], [2]]))
    assert found.lengths.tolist() == [0, 1]
    assert found.candidates.tolist() == [[NONE, NONE], [6, 9]]
    table.learn_text([1, 7])
    assert table.find(np.array([[1], [2]])).candidates.tolist() == [[7, NONE], [NONE, NONE]]


@pytest.mark.parametrize("draft", ["recycle", "suffix"])
def test_processors_with_memory_get_a_chain(llama: PreTrainedModel, draft: str) -> None:
    spec, ids = selfspec.wrap(llama, draft, draft_length=5), tiny.prompt(9)
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList([Remembering()]), "max_new_tokens": 32}
    for _ in range(2):
        output = spec.generate(ids, **GREEDY, **options)
        assert torch.equal(output.sequences, stock(llama, ids, 32))
    assert output.stats.accepted > 0
