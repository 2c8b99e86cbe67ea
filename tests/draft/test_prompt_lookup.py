"""Look-ups and cascades: what is drafted, that it costs no pass, and which drafts; where a text ended so before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.reference import Calls
from selfspec.control import Control, Controller
from selfspec.control.costs import CostsByRows
from selfspec.draft import Budget, Cascade, EarlyExit, PromptLookup
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
from selfspec.draft.suffixes import SortedCorpus, TextMemory, sorted_ends

LOOPING = torch.tensor([[5, 9, 7, 5, 9, 7, 5, 9]])


def drafts_of(spec: selfspec.SelfSpeculative, ids: torch.Tensor, new: int = 12, **options: Any) -> list[Any]:
    return [
        [row.draft for row in chunk.rows] for chunk in spec.stream(ids, max_new_tokens=new, do_sample=False, **options)
    ]


def test_it_drafts_what_followed_before(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, PromptLookup(2, 4), draft_length=4)
    assert drafts_of(spec, LOOPING)[0] == [(7, 5, 9, 7)]


def test_where_nothing_matches_the_round_is_plain(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, PromptLookup(2, 4), draft_length=4)
    assert drafts_of(spec, torch.tensor([[5, 9, 7, 11]]))[0] == [()]


def test_a_row_without_a_match_drafts_along_with_the_others(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, PromptLookup(2, 4), draft_length=3)
    ids = torch.cat([LOOPING, torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])])
    assert drafts_of(spec, ids)[0] == [(7, 5, 9), (8, 8, 8)]


@pytest.mark.parametrize("name", ["lookup", "lookup+exit:1"])
def test_rows_with_a_match_that_cannot_pay_for_the_others_are_not_looked_up(llama: PreTrainedModel, name: str) -> None:
    dear = selfspec.Costs(draft=9.0, widening=0.5, out_of_step=1.0, rows=2)
    spec = selfspec.wrap(llama, name, draft_length=selfspec.CostAware(3, costs=dear))
    other = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    assert drafts_of(spec, torch.cat([LOOPING, other]), new=40)[0] == [(), ()]
    assert all(drafts_of(spec, torch.cat([LOOPING, LOOPING]), new=40)[0])


def test_it_learns_from_what_it_generates(llama: PreTrainedModel) -> None:
    # Greedy text of a tiny model runs into a loop, which is then looked up.
    spec = selfspec.wrap(llama, PromptLookup(1, 3), draft_length=4)
    output = spec.generate(tiny.prompt(5), max_new_tokens=120, do_sample=False)
    wanted = llama.generate(tiny.prompt(5), max_new_tokens=120, do_sample=False)
    assert torch.equal(output.sequences, wanted)
    assert output.stats.accepted > 0
    assert output.stats.mean_accepted_length > 1


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
    fresh = torch.tensor([[5, 9, 7, 11]])
    assert drafts_of(spec, fresh)[0] == drafts_of(by_exit, fresh)[0]
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
    (_, second), (third,) = proposer._texts, other._texts
    proposer.join(other)
    proposer.select([2, 1])
    assert proposer._texts == [third, second]


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


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4), st.lists(st.integers(0, 2), min_size=1)
)
def test_a_sorted_corpus_finds_what_reading_through_it_does(texts: list[list[int]], context: list[int]) -> None:
    text = [token for each in texts for token in (*each, NONE)]
    tokens = np.array(text, dtype=np.int32)
    found = SortedCorpus(tokens, sorted_ends(tokens, 8)).places(context, 8)
    assert [sorted(each.tolist()) for each in found] == _places(text, context, 8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(NONE, 3), min_size=1, max_size=60), st.integers(1, 12))
def test_ends_are_sorted_by_the_tokens_before_them_nearest_first(text: list[int], longest: int) -> None:
    ends = sorted_ends(np.array(text, dtype=np.int32), longest).tolist()
    assert sorted(ends) == list(range(1, len(text) + 1))
    before = [text[max(end - longest, 0) : end][::-1] for end in ends]
    assert before == sorted(before)


def test_of_many_places_some_are_kept() -> None:
    tokens = np.array([1, 2] * 500 + [NONE], dtype=np.int32)
    (latest, _) = places_in(tokens, [1, 2], 2)
    assert latest.tolist() == list(range(1000 - 2 * MOST_PLACES + 2, 1001, 2))
    spread = SortedCorpus(tokens, sorted_ends(tokens, 16)).places([2], 1)[0]
    assert len(spread) == MOST_PLACES


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
