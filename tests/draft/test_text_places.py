"""Where a text has ended before as it ends now, by reading through it and by halving a sorted corpus."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.draft.prompt_lookup import MOST_PLACES, NONE, Match, OwnText, following, last_match, places_in
from selfspec.draft.suffixes import SortedCorpus, TextMemory, sorted_ends


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


def test_what_followed_a_match_goes_round_at_the_end_of_the_text() -> None:
    text = np.array([5, 1, 2, 9, 1, 2], dtype=np.int32)
    match = last_match(text, 1, 3)
    assert match == Match(end=3, length=2)
    assert following(text, match, 8) == [9, 1, 2, 9, 1, 2, 9, 1]


def test_a_loop_is_continued() -> None:
    text = np.array([1, 2, 3] * 3, dtype=np.int32)
    match = last_match(text, 2, 5)
    assert match is not None
    assert following(text, match, 7) == [1, 2, 3, 1, 2, 3, 1]
