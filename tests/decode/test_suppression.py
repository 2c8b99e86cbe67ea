"""Suppressed tokens: the scores of `transformers`' processors, and one search of the vocabulary for all places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, generation

from selfspec.decode.processors import PrefixProcessing, Warping, read_processing, without_search

TOKENS = [3, 0, 17]
ALWAYS = generation.SuppressTokensLogitsProcessor(TOKENS)
AT_FOUR = generation.SuppressTokensAtBeginLogitsProcessor(TOKENS, 4)


@pytest.mark.parametrize("stock", [ALWAYS, AT_FOUR], ids=["always", "at the begin"])
@pytest.mark.parametrize("length", [3, 4, 5])
def test_scores_are_those_of_transformers(stock: Any, length: int) -> None:
    ours = without_search(stock)
    assert ours is not stock
    ids = torch.zeros(2, length, dtype=torch.long)
    for size in (20, 31, 20):
        scores = torch.randn(2, size)
        scores[0, 1] = torch.nan
        assert torch.equal(ours(ids, scores).nan_to_num(), stock(ids, scores).nan_to_num())


def test_the_vocabulary_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[Tensor] = []
    search = torch.isin

    def counted(among: Tensor, tokens: Tensor) -> Tensor:
        searches.append(tokens)
        return search(among, tokens)

    monkeypatch.setattr(torch, "isin", counted)
    processing = read_processing(LogitsProcessorList([ALWAYS]), frozenset(), 9)
    assert isinstance(processing, Warping)
    for _ in range(3):
        processing.processors[0](torch.zeros(1, 4), torch.randn(1, 20))
    assert len(searches) == 1
    assert isinstance(read_processing(LogitsProcessorList([ALWAYS, AT_FOUR]), frozenset(), 9), PrefixProcessing)


def test_others_stay_what_they_are() -> None:
    class Own(generation.SuppressTokensLogitsProcessor):
        pass

    others: list[LogitsProcessor] = [Own(TOKENS), generation.MinLengthLogitsProcessor(3, 2)]
    assert all(without_search(each) is each for each in others)
