"""The table of candidates: what passes and texts leave in it."""

from __future__ import annotations

import numpy as np

from selfspec.draft.candidate_table import NONE, CandidateTable


def test_candidates_of_the_last_pass_replace_those_before() -> None:
    table = CandidateTable(2)
    table.learn(np.array([3, 5, 3]), np.array([[1, 2], [7, 8], [4, 6]]))
    assert [table.after(np.array([3, 5, 4]), rank).tolist() for rank in range(3)] == [
        [4, 7, NONE],
        [6, 8, NONE],
        [NONE] * 3,
    ]


def test_a_token_beyond_all_seen_has_no_candidates() -> None:
    table = CandidateTable(2)
    table.learn(np.array([3]), np.array([[1, 2]]))
    assert table.after(np.array([[3], [900]]), 0).tolist() == [[1], [NONE]]


def test_what_follows_in_a_text_comes_first() -> None:
    table = CandidateTable(3)
    table.learn_text([1, 2, 1, 3, 1, 2])
    assert [int(table.after(np.array([1]), rank)[0]) for rank in range(3)] == [2, 3, NONE]
    table.learn_text([1, 4, 1, 5])
    assert [int(table.after(np.array([1]), rank)[0]) for rank in range(3)] == [5, 4, 2]
    table.learn_text([])


def test_it_takes_four_bytes_a_candidate() -> None:
    table = CandidateTable(8)
    table.learn_text([0, 99])
    assert table.kept == 8
    assert table.nbytes == 4 * 8 * 100
