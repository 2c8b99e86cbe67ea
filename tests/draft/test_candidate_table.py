"""The table of candidates by context, against lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.draft.recycling import NONE, CandidateTable


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
