"""Drafts out of texts, look-ups, suffixes and recycled candidates: what is drafted and kept, and cascades of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
from helpers.reference import Calls
from selfspec.cache.tree import Tree
from selfspec.control import Control, Controller
from selfspec.control.costs import CostsByRows
from selfspec.draft import Budget, Cascade, EarlyExit, PromptLookup, Recycling, Suffixes
from selfspec.draft.prompt_lookup import (
    MOST_PLACES,
    NONE,
    LookUpProposer,
    Match,
    OwnText,
    following,
    last_match,
    places_in,
)
from selfspec.draft.recycling import CandidateTable, RecyclingMemory, contexts_of
from selfspec.draft.suffixes import TextMemory

LOOPING = torch.tensor([[5, 9, 7, 5, 9, 7, 5, 9]])


def drafts_of(spec: selfspec.SelfSpeculative, ids: torch.Tensor, new: int = 12, **options: Any) -> list[Any]:
    return [
        [row.draft for row in chunk.rows] for chunk in spec.stream(ids, max_new_tokens=new, do_sample=False, **options)
    ]


OTHER = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])


@pytest.mark.parametrize(
    ("ids", "drafted"),
    [(LOOPING, [(7, 5, 9)]), (OTHER, [()]), (torch.cat([LOOPING, OTHER]), [(7, 5, 9), (8, 8, 8)])],
    ids=["a match", "none", "a row without one along with the other"],
)
def test_it_drafts_what_followed_before(llama: PreTrainedModel, ids: torch.Tensor, drafted: Any) -> None:
    assert drafts_of(selfspec.wrap(llama, PromptLookup(2, 4), draft_length=3), ids)[0] == drafted


@pytest.mark.parametrize("name", ["lookup", "lookup+exit:1"])
def test_rows_with_a_match_that_cannot_pay_for_the_others_are_not_looked_up(llama: PreTrainedModel, name: str) -> None:
    dear = selfspec.Costs(draft=9.0, widening=0.5, out_of_step=1.0, rows=2)
    spec = selfspec.wrap(llama, name, draft_length=selfspec.CostAware(3, costs=dear))
    assert drafts_of(spec, torch.cat([LOOPING, OTHER]), new=40)[0] == [(), ()]
    assert all(drafts_of(spec, torch.cat([LOOPING, LOOPING]), new=40)[0])


def test_a_look_up_runs_no_layer(llama: PreTrainedModel) -> None:
    calls = Calls()
    for number, layer in enumerate(llama.model.layers):
        calls.watch(number, layer)
    spec = selfspec.wrap(llama, PromptLookup(2, 4), draft_length=4)
    run = spec.stream(LOOPING, max_new_tokens=12, do_sample=False)
    next(run)
    # Prefill of all but the last token, then one target pass over it and the draft.
    assert dict(calls.tokens) == dict.fromkeys(range(4), 7 + 5)


def test_a_cascade_drafts_with_the_model_where_nothing_matches(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, Cascade(PromptLookup(2, 4), EarlyExit(2)), draft_length=selfspec.FixedLength(3))
    by_exit = selfspec.wrap(llama, EarlyExit(2), draft_length=3)
    assert drafts_of(spec, OTHER)[0] == drafts_of(by_exit, OTHER)[0]
    assert drafts_of(spec, LOOPING)[0] == [(7, 5, 9)]


@dataclass
class _Asked(Control, Controller):
    """Looks up four tokens every round; notes the shares it is told."""

    most: Budget = field(default=Budget(4, 4))
    shares: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        Controller.__init__(self, self.most)

    def begin(self, costs: CostsByRows) -> Controller:
        return self

    def budget(self, remaining: int, unfinished: Sequence[bool]) -> Budget:
        return self.most.within(remaining - 1)

    def look_up_length(self, share: float) -> int:
        self.shares.append(share)
        return self.most.depth


def test_what_counts_is_whether_the_slowest_rows_have_a_match(llama: PreTrainedModel) -> None:
    prompts = torch.cat([tiny.prompt(8, seed=seed) for seed in range(6)])
    control = _Asked()
    spec = selfspec.wrap(llama, PromptLookup(2, 2), draft_length=control)
    texts: list[list[int]] = prompts.tolist()
    expected, ahead = [], False
    for chunk in spec.stream(prompts, max_new_tokens=60, do_sample=False):
        lengths = [len(text) for text in texts]
        matched = [
            any(text[start : start + 2] == text[-2:] for start in range(len(text) - 2)) and len(text) < 68
            for text in texts
        ]
        behind = [match for match, length in zip(matched, lengths, strict=True) if length == min(lengths)]
        if any(matched) and min(lengths) < 67:
            expected.append(sum(behind) / len(behind))
            ahead = ahead or (expected[-1] == 0 and any(matched))
        for text, row in zip(texts, chunk.rows, strict=True):
            text += row.tokens
    assert control.shares == expected
    assert ahead
    assert len(set(expected)) > 1


def test_look_ups_follow_rows_that_join_and_leave() -> None:
    proposer, other = LookUpProposer(2, 5, [[], []]), LookUpProposer(2, 5, [[]])
    (_, second), (third,) = proposer.row_states, other.row_states
    proposer.join(other)
    proposer.select([2, 1])
    assert proposer.row_states == [third, second]


def _places(tokens: list[int], context: list[int], longest: int) -> list[list[int]]:
    """By the definition."""
    found = []
    for length in range(1, min(longest, len(context)) + 1):
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == context[-length:]]
        if not ends:
            break
        found.append(ends)
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(0, 2), min_size=1), st.integers(1, 6))
def test_places_are_found_by_the_definition(tokens: list[int], context: list[int], longest: int) -> None:
    found = places_in(np.array(tokens, dtype=np.int32), context, longest)
    assert [each.tolist() for each in found] == _places(tokens, context, longest)


def test_of_many_places_some_are_kept() -> None:
    tokens = np.array([1, 2] * 500 + [NONE], dtype=np.int32)
    (latest, _) = places_in(tokens, [1, 2], 2)
    assert latest.tolist() == list(range(1000 - 2 * MOST_PLACES + 2, 1001, 2))


def test_a_memory_drops_the_oldest_and_matches_across_no_end_of_a_text() -> None:
    memory = TextMemory(4 * 6)
    for text in ([5, 6], [6, 7], [8, 9]):
        memory.add(text)
    assert memory.tokens.tolist() == [6, 7, NONE, 8, 9, NONE]
    assert memory.tokens.nbytes <= 24
    assert [each.tolist() for each in places_in(memory.tokens, [6], 4)] == [[1]]
    assert places_in(memory.tokens, [7, 8], 4)[1:] == []
    assert places_in(TextMemory(64).tokens, [1], 4) == []


@pytest.mark.parametrize("nbytes", [0, 4])
def test_a_memory_without_room_keeps_next_to_nothing(nbytes: int) -> None:
    memory = TextMemory(nbytes)
    memory.add([1, 2, 3])
    assert memory.tokens.nbytes <= nbytes


def searched(tokens: list[int], shortest: int, longest: int) -> Match | None:
    """The same by comparing with every earlier place."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                alike = 0
                while alike < end and tokens[end - 1 - alike] == tokens[-1 - alike]:
                    alike += 1
                return Match(end, alike)
    return None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=6), st.integers(1, 3), st.integers(0, 3))
def test_finds_what_a_search_through_all_of_the_text_finds(pieces: list[list[int]], shortest: int, more: int) -> None:
    own, text = OwnText(), list[int]()
    for piece in pieces:
        own.extend(piece)
        text += piece
        assert own.tokens.tolist() == text
        assert last_match(own.tokens, shortest, shortest + more) == searched(text, shortest, shortest + more)


@pytest.mark.parametrize(
    ("text", "match", "followed"),
    [
        ([5, 1, 2, 9, 1, 2], Match(end=3, length=2), [9, 1, 2, 9, 1, 2, 9, 1]),
        ([1, 2, 3] * 3, Match(end=6, length=6), [1, 2, 3, 1, 2, 3, 1, 2]),
    ],
)
def test_what_followed_a_match_goes_round_at_the_end_of_the_text(
    text: list[int], match: Match, followed: list[int]
) -> None:
    tokens = np.array(text, dtype=np.int32)
    assert last_match(tokens, 1, 5) == match
    assert following(tokens, match, 8) == followed


def test_several_continuations_are_drafted_the_more_frequent_first(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, "suffix", draft_length=selfspec.FixedLength(2, nodes=5))
    # After 5 6 come two things, one of them three times as often.
    text = [9, 5, 6, 7, 8, 9, 10, 5, 6, 7, 8, 9, 3, 5, 6, 7, 8, 5, 6, 11, 12, 1, 5, 6]
    first = next(spec.stream(torch.tensor([text]), max_new_tokens=8, **GREEDY))
    draft = list(first.rows[0].draft)
    assert {7, 8, 11} <= set(draft)
    assert draft.index(7) < draft.index(11)


def test_what_was_written_is_drafted_by_this_wrapper_until_it_forgets(llama: PreTrainedModel) -> None:
    spec, ids = selfspec.wrap(llama, "suffix", draft_length=7), tiny.prompt(9, seed=4)
    first, again = (spec.generate(ids, max_new_tokens=32, **GREEDY) for _ in range(2))
    assert torch.equal(first.sequences, again.sequences)
    assert again.stats.rounds < first.stats.rounds
    assert again.stats.mean_accepted_length > 4
    assert 4 * 32 <= first.stats.draft_bytes <= again.stats.draft_bytes <= 1 << 20
    spec.forget()
    assert spec.generate(ids, max_new_tokens=32, **GREEDY).stats.rounds == first.stats.rounds
    alone = selfspec.wrap(llama, Suffixes(most_bytes=0), draft_length=7)
    assert len({alone.generate(ids, max_new_tokens=32, **GREEDY).stats.rounds for _ in range(2)}) == 1


def test_kept_texts_take_no_more_than_their_bytes(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, Suffixes(most_bytes=120), draft_length=7)
    for seed in range(3):
        spec.generate(tiny.prompt(9, 2, seed).clamp(min=1), max_new_tokens=24, **GREEDY)
    (memory,) = spec._memories.values()
    assert isinstance(memory, TextMemory)
    assert 100 < memory.tokens.nbytes <= 120


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


@pytest.mark.parametrize(
    ("draft", "control"), [("recycle", 5), ("suffix", 5), ("exit:3", selfspec.FixedLength(3, nodes=8))], ids=str
)
def test_processors_with_memory_get_a_chain(llama: PreTrainedModel, draft: str, control: Any) -> None:
    spec, ids = selfspec.wrap(llama, draft, draft_length=control), tiny.prompt(9)
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList([Remembering()]), "max_new_tokens": 32}
    for _ in range(2):
        output = spec.generate(ids, **GREEDY, **options)
        assert torch.equal(output.sequences, stock(llama, ids, 32))
    assert output.stats.accepted > 0
