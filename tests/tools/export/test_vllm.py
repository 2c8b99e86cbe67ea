"""Look-ups for vLLM: each request drafts from its own text, whichever row it has moved to."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

import selfspec
from selfspec.draft.prompt_lookup import following, last_match
from selfspec.tools.export.vllm import LookUps

CONTEXT = 64


def _config(length: int = 4) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=length),
        model_config=SimpleNamespace(max_model_len=CONTEXT),
    )


def _step(proposer: LookUps, texts: list[list[int]], gained: list[list[int]]) -> list[list[int]]:
    # vLLM's arrays have rows to spare.
    tokens = np.zeros((8, CONTEXT), dtype=np.int32)
    lengths = np.zeros(8, dtype=np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        lengths[row] = len(text)
    return proposer.propose(gained, lengths, tokens, slot_mappings=None)


def _afresh(text: list[int], length: int = 4) -> list[int]:
    tokens = np.array(text, dtype=np.int32)
    match = last_match(tokens, 2, 5)
    return [] if match is None else following(tokens, match, length)


def test_it_copies_what_followed() -> None:
    proposer = LookUps(_config())
    proposer.load_model(None)
    assert _step(proposer, [[1, 2, 3, 4, 5, 1, 2]], [[2]]) == [[3, 4, 5, 1]]
    assert _step(proposer, [[1, 2, 3, 4]], [[4]]) == [[]]


def test_prompts_that_are_being_read_and_full_rows_get_no_draft() -> None:
    proposer = LookUps(_config())
    full = [1, 2] * (CONTEXT // 2)
    assert _step(proposer, [[1, 2, 3, 1, 2], full, full[:-2]], [[], [2], [2]]) == [[], [], [1]]


def test_rows_that_join_leave_and_move_draft_from_their_own_text() -> None:
    rng, proposer = random.Random(0), LookUps(_config())
    texts: list[list[int]] = []
    for _ in range(60):
        if len(texts) < 6 and rng.random() < 0.4:
            texts.append([rng.randrange(4) for _ in range(rng.randrange(1, 10))])
        if texts and rng.random() < 0.2:
            texts.pop(rng.randrange(len(texts)))
        rng.shuffle(texts)
        gained = [[rng.randrange(4) for _ in range(rng.randrange(1, 3))] for _ in texts]
        texts = [text + new for text, new in zip(texts, gained, strict=True) if len(text) < CONTEXT - 12]
        drafts = _step(proposer, texts, [text[-1:] for text in texts])
        assert drafts == [_afresh(text) for text in texts]


def test_match_lengths_are_a_subclass_s() -> None:
    class Long(LookUps):
        shortest, longest = 4, 6

    assert _step(Long(_config()), [[1, 2, 3, 4, 5, 1, 2]], [[2]]) == [[]]

    class Wrong(LookUps):
        shortest = 9

    with pytest.raises(selfspec.errors.DraftConfigError, match="match lengths"):
        Wrong(_config())
