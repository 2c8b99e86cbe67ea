"""Caches of rows that have ended: the next text that begins alike is read from where it differs, and says the same."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers.http_server import Running
from helpers.published_heads import with_head
from helpers.serving import Asked, Mix, Stepped, alone, check_mix, random_requests, small
from helpers.shrunken import shrunken
from selfspec.cache.shared_cache import SharedCache
from selfspec.serve.cache_budget import PrefixCache, shared
from selfspec.serve.row_request import RowRequest, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
DRAFTS = {"exit": "exit:1", "lookup": "lookup", "int8": "int8", "cascade": "lookup+exit:1", "none": None}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return small()


def turn(engine: Stepped, model: PreTrainedModel, text: tuple[int, ...], new: int = 6) -> int:
    """Ask, compare with the model alone, and return how many tokens of the text were not read."""
    request = RowRequest(text, new, GREEDY, frozenset())
    seen = engine.submit(request)
    engine.run()
    assert seen.tokens == alone(model, Asked(request))
    return int(next(event.cached for event in seen.events if hasattr(event, "cached")))


def text_of(length: int, seed: int, vocabulary: int = 24) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(vocabulary) for _ in range(length))


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_next_turn_reads_what_is_new(model: PreTrainedModel, draft: str) -> None:
    engine = Stepped(selfspec.wrap(model, DRAFTS[draft], draft_length=3), kept=True)
    text = text_of(18, 1)
    assert turn(engine, model, text) == 0
    answer = tuple(alone(model, Asked(RowRequest(text, 6, GREEDY, frozenset()))))
    read = engine.scheduler.stats().prompt_tokens
    longer = (*text, *answer, *text_of(4, 2))
    assert turn(engine, model, longer) == 23
    assert engine.scheduler.stats().prompt_tokens == read + len(longer) - 1 - 23
    # Another one that shares the beginning alone, and one that shares nothing.
    assert turn(engine, model, (*text[:17], 23 - text[17], 3, 4)) == 17
    assert turn(engine, model, text_of(18, 3)) == 0
    # The very same text: its last token is read in any case.
    assert turn(engine, model, longer) == len(longer) - 1
    assert engine.scheduler.stats().cached_tokens == 23 + 17 + len(longer) - 1


@pytest.mark.contract
@pytest.mark.parametrize("name", ["falcon_mamba", "qwen3_next"])
def test_states_are_taken_as_a_whole(name: str) -> None:
    stateful = shrunken(name).double().eval()
    engine = Stepped(selfspec.wrap(stateful, "lookup", draft_length=3), kept=True)
    vocabulary = min(24, engine.vocabulary)
    text = text_of(18, 1, vocabulary)
    assert turn(engine, stateful, text, 5) == 0
    answer = alone(stateful, Asked(RowRequest(text, 5, GREEDY, frozenset())))
    assert turn(engine, stateful, (*text, *answer, 3, 4)) == 22
    assert turn(engine, stateful, (*text[:-1], 5, 6)) == 0


def test_who_leaves_is_kept_too(model: PreTrainedModel) -> None:
    engine = Stepped(selfspec.wrap(model, "lookup"), kept=True)
    text = text_of(18, 5)
    seen = engine.submit(RowRequest(text, 20, GREEDY, frozenset()))
    while len(seen.tokens) < 4:
        engine.step()
    seen.ticket.cancel()
    engine.run()
    assert turn(engine, model, (*text, *seen.tokens, 3)) >= 21


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("tokens", [60, 150, None])
def test_rows_of_mixes_that_begin_alike_are_what_they_are_alone(
    model: PreTrainedModel, draft: str, tokens: int | None
) -> None:
    """In little room, too: what is kept gives way."""
    rng = random.Random(sum(map(ord, draft)))
    engine = Stepped(selfspec.wrap(model, DRAFTS[draft], draft_length=3), rng.randint(1, 4), 16, tokens, kept=True)
    starts = [text_of(rng.randint(16, 22), seed) for seed in range(3)]
    asked = [
        replace(
            each,
            request=replace(each.request, input_ids=(*rng.choice(starts), *each.request.input_ids)),
            arrives=2 * at,
        )
        for at, each in enumerate(random_requests(rng, 16, engine.vocabulary, 12))
        if each.breaks is None and each.cancelled is None
    ]
    mix = Mix(engine)
    mix.run(asked)
    check_mix(model, mix, asked, [alone(model, each) for each in asked])
    assert engine.most_bytes <= engine.budget.bound
    if tokens is None:
        assert engine.scheduler.stats().cached_tokens > 0


def test_nothing_is_kept_where_a_drafter_keeps_states_of_its_own(tmp_path: Path) -> None:
    model, draft = with_head("eagle3", tmp_path)
    engine = Stepped(selfspec.wrap(model, draft), kept=True)
    assert turn(engine, model, text_of(18, 1)) == turn(engine, model, text_of(18, 1)) == 0
    assert engine.scheduler.stats().kept_bytes == 0


def cache_of(length: int) -> SharedCache:
    cache = SharedCache(1, 1, 64, 2, torch.device("cpu"))
    cache.hold(1, length)
    cache.layers[0].update(torch.ones(1, 1, length, 4), torch.ones(1, 1, length, 4))
    cache.commit([length])
    return cache


def test_the_least_used_goes_first() -> None:
    one, two, three = (text_of(20, seed) for seed in range(3))
    kept = PrefixCache(2 * cache_of(20).nbytes)
    kept.keep(one, cache_of(20))
    kept.keep(two, cache_of(20))
    assert kept.find((*one, 1), bool) is not None
    kept.keep(three, cache_of(20))
    assert kept.nbytes <= kept.bound
    assert kept.find((*two, 1), bool) is None
    found = kept.find((*one[:18], 25, 3), bool)
    assert found is not None
    assert found.tokens == 18
    kept.shrink(0)
    assert kept.nbytes == 0


def test_a_longer_one_takes_the_place_of_its_beginning() -> None:
    text = text_of(30, 1)
    kept = PrefixCache(10 * cache_of(30).nbytes)
    kept.keep(text[:20], cache_of(20))
    kept.keep(text, cache_of(30))
    assert kept.nbytes == cache_of(30).nbytes
    kept.keep(text[:25], cache_of(25))
    assert kept.nbytes == cache_of(30).nbytes
    assert kept.find(text_of(30, 2), bool) is None


def test_shared() -> None:
    assert [shared((1, 2, 3), other) for other in ((), (1,), (1, 2, 4), (1, 2, 3, 4), (2,))] == [0, 1, 2, 3, 0]


def test_usage_says_what_was_not_read(server: Running) -> None:
    prompt = "Lily and Ben went to the park. They saw a big dog. The dog was very"
    first = server.complete(prompt=prompt, temperature=0).body
    again = server.complete(prompt=prompt, temperature=0).body
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1
    options = {"include_usage": True}
    last = server.complete(prompt=prompt, temperature=0, stream=True, stream_options=options).events[-1]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert b"vllm:prefix_cache_hits_total" in server.ask("/metrics").raw
