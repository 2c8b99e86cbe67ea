"""The index of suffixes, against a search through the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.draft.suffix_index import Match, SuffixIndex


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
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=6),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_finds_what_a_search_through_all_of_the_text_finds(pieces: list[list[int]], shortest: int, more: int) -> None:
    index, text = SuffixIndex(shortest, shortest + more), []
    for piece in pieces:
        index.extend(piece)
        text += piece
        assert len(index) == len(text)
        assert index.find() == searched(text, shortest, shortest + more)


def test_what_followed_a_match_goes_round_at_the_end_of_the_text() -> None:
    index = SuffixIndex(1, 3)
    index.extend([5, 1, 2, 9, 1, 2])
    match = index.find()
    assert match == Match(end=3, length=2)
    assert index.after(match, 8) == [9, 1, 2, 9, 1, 2, 9, 1]


def test_a_loop_is_continued() -> None:
    index = SuffixIndex(2, 5)
    index.extend([1, 2, 3] * 3)
    match = index.find()
    assert match is not None
    assert index.after(match, 7) == [1, 2, 3, 1, 2, 3, 1]
