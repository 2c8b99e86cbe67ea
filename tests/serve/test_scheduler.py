"""Scheduling: who is next, how much is read before a round, and who gives back the cache when it is full.

The next text that begins like a row that has ended is read from where it differs, and says the same.
Where drafts cost more than they bring at a load, the faster kind of round runs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers.drafting import outcome
from helpers.http_server import Running
from helpers.published_heads import with_head
from helpers.serving import Asked, Seen, Stepped, alone, check_mix, random_requests, small
from helpers.shrunken import shrunken
from selfspec.cache.shared_cache import SharedCache
from selfspec.control.costs import Costs
from selfspec.draft.draft import Draft
from selfspec.serve.by_load import LoadGate
from selfspec.serve.cache_budget import CacheBudget, PrefixCache, Storage
from selfspec.serve.events import Committed
from selfspec.serve.row_decoder import CacheSizes
from selfspec.serve.row_request import RowRequest
from selfspec.serve.scheduler import kept_rows

GREEDY = {"do_sample": False}
ENDLESS = {**GREEDY, "eos_token_id": None}
DRAFTS = {"exit": "exit:1", "lookup": "lookup", "int8": "int8", "cascade": "lookup+exit:1", "none": None}


def text_of(length: int, seed: int, vocabulary: int = 24) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(vocabulary) for _ in range(length))


def asked(length: int, new: int, seed: int = 0) -> RowRequest:
    return RowRequest(text_of(length, seed), new, GREEDY)


def begun(seen: Seen) -> bool:
    return any(isinstance(event, Committed) for event in seen.events)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return small()


def test_requests_begin_in_the_order_in_which_they_came(model: PreTrainedModel) -> None:
    engine = Stepped(selfspec.wrap(model), 3, 8)
    seen = [engine.submit(asked(3 + number % 4, 3 + number % 5, number)) for number in range(12)]
    while engine.scheduler.busy:
        engine.step()
        has_begun = [begun(each) for each in seen]
        assert has_begun == sorted(has_begun, reverse=True)
        assert engine.scheduler.stats().running <= 3
    assert all(has_begun)


def test_one_that_needs_much_room_is_not_passed_by(model: PreTrainedModel) -> None:
    engine = Stepped(selfspec.wrap(model), 4, 64, tokens=40, margin=64)
    first, large = engine.submit(asked(4, 12)), engine.submit(asked(20, 16))
    small_ones = [engine.submit(asked(2, 4, number)) for number in range(3)]
    while not begun(large):
        engine.step()
        assert not any(map(begun, small_ones))
    assert first.end.reason == "length"
    engine.run()
    assert [each.end.reason for each in (large, *small_ones)] == ["length"] * 4


def test_a_few_short_prompts_are_read_before_long_ones_that_wait(model: PreTrainedModel) -> None:
    engine = Stepped(selfspec.wrap(model), 64, prefill_tokens=5)
    requests = [asked(40 if number < 3 else 4, 4, number) for number in range(23)]
    long = [engine.submit(request) for request in requests[:3]]
    engine.step()
    short = [engine.submit(request) for request in requests[3:]]
    begin: list[Seen] = []
    while engine.scheduler.busy:
        begin += [each for each in (*long, *short) if begun(each) and each not in begin]
        engine.step()
    # The first is being read already; each of the others is passed by eight.
    assert begin[0] is long[0]
    assert begin.index(long[1]) == 9
    assert begin.index(long[2]) == 18
    for each, request in zip((*long, *short), requests, strict=True):
        ids = torch.tensor([request.input_ids])
        assert each.tokens == model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :].tolist()


def test_prompts_are_read_in_chunks_between_rounds(model: PreTrainedModel) -> None:
    engine = Stepped(selfspec.wrap(model), 4, prefill_tokens=5)
    running = engine.submit(asked(2, 30))
    engine.step()
    engine.submit(asked(23, 4))
    read, chunks = engine.scheduler.stats().prompt_tokens, []
    while engine.scheduler.stats().running < 2:
        before = len(running.tokens)
        engine.step()
        chunks.append(engine.scheduler.stats().prompt_tokens - read)
        read += chunks[-1]
        # The row that runs goes on meanwhile.
        assert len(running.tokens) == before + 1
    # All but the last token, which the first round reads.
    assert chunks == [5, 5, 5, 5, 2]
    # Short ones share a chunk.
    engine = Stepped(selfspec.wrap(model), 8, prefill_tokens=20)
    for number in range(6):
        engine.submit(asked(5, 9, number))
    engine.step()
    assert engine.scheduler.stats().prompt_tokens == 20
    assert engine.scheduler.stats().running == 5


def test_the_row_that_came_last_gives_its_cache_back_and_goes_on_later(model: PreTrainedModel) -> None:
    engine = Stepped(selfspec.wrap(model, "lookup", draft_length=3), 4, 64, tokens=60)
    requests = [asked(6, 34, number) for number in range(4)]
    seen = [engine.submit(request) for request in requests]
    later = engine.submit(asked(2, 2, 9))
    before, ended = 0, []
    while engine.scheduler.busy:
        engine.step()
        ended += [number for number, each in enumerate(seen) if each.ticket.finished and number not in ended]
        stats = engine.scheduler.stats()
        if stats.preemptions > before:
            before = stats.preemptions
        # One that came later does not begin while an earlier one waits.
        if stats.waiting > 1:
            assert not begun(later)
    assert before > 0
    assert ended == [0, 1, 2, 3]
    for request, each in zip(requests, seen, strict=True):
        assert each.tokens == alone(model, Asked(request))
        assert each.end.completion_tokens == 34
    assert engine.most_bytes <= engine.budget.bound


def test_a_row_that_is_read_again_has_fresh_noise(model: PreTrainedModel) -> None:
    """A drawn row is in a round of its own, which it must not begin again."""
    engine = Stepped(selfspec.wrap(model), 2, 64, tokens=30)
    engine.submit(asked(4, 20))
    row = engine._decoder.row(replace(asked(4, 20, 1), options={"do_sample": True, "top_k": 0}))
    seen = engine.submit_row(row)
    while not engine.scheduler.stats().preemptions:
        engine.step()
    assert row.noise._rounds.tolist() == [len(seen.tokens)]
    engine.run()
    assert len(seen.tokens) == 20


def test_a_request_is_cancelled_wherever_it_is(model: PreTrainedModel) -> None:
    engine = Stepped(selfspec.wrap(model), 2, prefill_tokens=4)
    running, going_on = engine.submit(asked(2, 40)), engine.submit(asked(3, 6))
    engine.step()
    waiting = engine.submit(asked(4, 4))
    waiting.ticket.cancel()
    engine.step()
    assert waiting.end.reason == "cancelled"
    assert waiting.end.completion_tokens == 0
    running.ticket.cancel()
    engine.step()
    assert running.end.reason == "cancelled"
    reading = engine.submit(asked(12, 4))
    engine.step()
    assert engine.scheduler.stats().prefilling == 1
    reading.ticket.cancel()
    engine.step()
    assert reading.end.reason == "cancelled"
    engine.run()
    # One that ended keeps its end.
    going_on.ticket.cancel()
    engine.step()
    assert going_on.end.reason == "length"
    assert going_on.tokens == alone(model, Asked(asked(3, 6)))
    assert engine.scheduler.stats().finished == {"cancelled": 3, "length": 1}


def test_a_callback_that_raises_cancels_its_row_alone(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    engine = Stepped(selfspec.wrap(model))
    other = engine.submit(asked(3, 12))
    broken = engine.submit(asked(4, 12))
    events = broken.events

    def on_event(event: object) -> None:
        events.append(event)  # type: ignore[arg-type]
        if len(events) == 2:
            raise ConnectionError("nobody is there")

    broken.ticket._on_event = on_event
    engine.run()
    assert broken.end.reason == "cancelled"
    assert len(broken.tokens) == 2
    assert other.tokens == alone(model, Asked(asked(3, 12)))
    assert "the callback of a request raised" in caplog.text


@pytest.mark.parametrize("failures", [1, 2])
def test_a_round_that_fails_ends_no_row_that_does_not_fail_alone(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    engine = Stepped(selfspec.wrap(model), 2)
    seen = [engine.submit(asked(3 + number, 6, number)) for number in range(4)]
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine._decoder, "round", Mock(side_effect=torch.OutOfMemoryError("no room on the device")))
        for _ in range(failures):
            engine.step()
    engine.run()
    # The second time the first row ran alone.
    ended = failures - 1
    for each in seen[:ended]:
        assert each.end.reason == "error"
        assert isinstance(each.end.error, selfspec.errors.RowError)
        assert isinstance(each.end.error.__cause__, torch.OutOfMemoryError)
    for number in range(ended, 4):
        assert seen[number].tokens == alone(model, Asked(asked(3 + number, 6, number)))
    assert engine.scheduler.stats().cache_bytes == 0


def test_rows_that_stay_move_as_little_as_can_be() -> None:
    assert kept_rows(5, {1}) == [0, 4, 2, 3]
    assert kept_rows(5, {0, 4}) == [3, 1, 2]
    assert kept_rows(4, {2, 3}) == [0, 1]
    assert kept_rows(3, {0, 1, 2}) == []


def test_storage_is_roomy_where_there_is_room_and_tight_where_not() -> None:
    sizes = CacheSizes(slot=10, row=0, slack=2)
    budget = CacheBudget(sizes, sizes.of(4, 40), 8)
    now = Storage(1, 10)
    assert budget.storage(now, 2, 15, 100, 0) == Storage(4, 30)
    assert budget.storage(now, 2, 50, 100, 0) == Storage(2, 50)
    assert budget.storage(now, 4, 41, 100, 0) is None
    assert budget.storage(now, 4, 40, 100, 1) is None
    # What is there and fits stays as it is.
    assert budget.storage(Storage(3, 20), 2, 15, 100, 0) == Storage(3, 20)
    # No more than a row may come to have.
    assert budget.storage(now, 1, 15, 16, 0) == Storage(1, 16)


def turn(engine: Stepped, model: PreTrainedModel, text: tuple[int, ...], new: int = 6) -> int:
    """Ask, compare with the model alone, and return how many tokens of the text were not read."""
    request = RowRequest(text, new, ENDLESS)
    seen = engine.submit(request)
    engine.run()
    assert seen.tokens == alone(model, Asked(request))
    return int(next(event.cached for event in seen.events if hasattr(event, "cached")))


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_next_turn_reads_what_is_new(model: PreTrainedModel, draft: str) -> None:
    engine = Stepped(selfspec.wrap(model, DRAFTS[draft], draft_length=3), kept=True)
    text = text_of(18, 1)
    assert turn(engine, model, text) == 0
    answer = tuple(alone(model, Asked(RowRequest(text, 6, ENDLESS))))
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
    answer = alone(stateful, Asked(RowRequest(text, 5, ENDLESS)))
    assert turn(engine, stateful, (*text, *answer, 3, 4)) == 22
    assert turn(engine, stateful, (*text[:-1], 5, 6)) == 0


def test_who_leaves_is_kept_too(model: PreTrainedModel) -> None:
    engine = Stepped(selfspec.wrap(model, "lookup"), kept=True)
    text = text_of(18, 5)
    seen = engine.submit(RowRequest(text, 20, ENDLESS))
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
    check_mix(model, engine, asked)
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


def test_several_answers_to_a_prompt_read_it_once(model: PreTrainedModel) -> None:
    engine, request = Stepped(selfspec.wrap(model), 4, 16, kept=True), asked(60, 5)
    seen = [engine.submit(request) for _ in range(4)]
    engine.run()
    assert engine.scheduler.stats().prompt_tokens == 59
    assert [each.tokens for each in seen] == [alone(model, Asked(request))] * 4


def test_a_long_prompt_is_read_in_pieces_by_time(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine reads few tokens between two rounds of the rows that run."""
    clock = Mock(perf_counter=Mock(side_effect=itertools.count(0, 10)))
    monkeypatch.setattr("selfspec.serve.scheduler.time", clock)
    engine = Stepped(selfspec.wrap(model), 2, 512)
    engine.submit(asked(3, 60))
    engine.step()
    long = engine.submit(asked(110, 2, 1))
    steps = 0
    while not begun(long):
        engine.step()
        steps += 1
    assert steps == 4


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
    assert found[1] == 18
    kept.shrink(0)
    assert kept.nbytes == 0
    # A longer one takes the place of its beginning.
    text = text_of(30, 1)
    kept = PrefixCache(10 * cache_of(30).nbytes)
    kept.keep(text[:20], cache_of(20))
    kept.keep(text, cache_of(30))
    assert kept.nbytes == cache_of(30).nbytes
    kept.keep(text[:25], cache_of(25))
    assert kept.nbytes == cache_of(30).nbytes
    assert kept.find(text_of(30, 2), bool) is None


def test_usage_says_what_was_not_read(server: Running) -> None:
    prompt = "Lily and Ben went to the park. They saw a big dog. The dog was very"
    first = server.complete(prompt=prompt, temperature=0).body
    again = server.complete(prompt=prompt, temperature=0).body
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1
    options = {"include_usage": True}
    last = server.complete(prompt=prompt, temperature=0, stream=True, stream_options=options).events[-1]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    before = server.served.engine.stats().prompt_tokens
    usage = server.complete(prompt=[prompt, "Tom " + prompt], n=3).body["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    # Of three answers one reads what is new.
    assert server.served.engine.stats().prompt_tokens - before < usage["prompt_tokens"] // 2 + 2
    assert b"vllm:prefix_cache_hits_total" in server.ask("/metrics").raw


def run(gate: LoadGate, rows: int, rounds: int, seconds: Callable[[bool], float]) -> list[bool]:
    """Which of some rounds drafted."""
    drafted = []
    for _ in range(rounds):
        drafts = gate.opens(rows)
        gate.count(rows, rows * (3 if drafts else 1), seconds(drafts))
        drafted.append(drafts)
    return drafted


@pytest.mark.parametrize(("of_draft", "pays"), [(2.0, True), (2.7, False), (4.0, False)])
@pytest.mark.parametrize("rows", [2, 7, 64])
def test_the_faster_kind_of_round_runs(of_draft: float, pays: bool, rows: int) -> None:
    # Passes of drafts come in many kinds, whose recording is not in the usual round: a small gain is none.
    drafted = run(LoadGate(), rows, 3000, lambda drafts: of_draft if drafts else 1.0)
    later = drafted[200:]
    assert sum(later) / len(later) == pytest.approx(float(pays), abs=0.02)
    # The other kind is still looked at.
    assert len(set(later)) == 2


def test_times_that_scatter_decide_by_what_is_usual() -> None:
    rng = random.Random(0)

    def seconds(drafts: bool) -> float:
        usual = (3.6 if drafts else 1.0) * rng.uniform(0.8, 1.2)
        return 100 * usual if rng.random() < 0.03 else usual

    drafted = run(LoadGate(), 16, 3000, seconds)
    assert sum(drafted[200:]) / 2800 < 0.1


def test_it_notices_a_change() -> None:
    gate = LoadGate()
    run(gate, 8, 1000, lambda drafts: 4.0 if drafts else 1.0)
    assert sum(run(gate, 8, 3000, lambda drafts: 2.0 if drafts else 1.0)[-500:]) > 450


def test_loads_are_judged_apart() -> None:
    gate = LoadGate()
    for _ in range(40):
        run(gate, 4, 10, lambda drafts: 2.0 if drafts else 1.0)
        run(gate, 32, 10, lambda drafts: 8.0 if drafts else 1.0)
    assert sum(run(gate, 3, 50, lambda drafts: 2.0 if drafts else 1.0)) > 45
    assert sum(run(gate, 17, 50, lambda drafts: 8.0 if drafts else 1.0)) < 5


def test_a_larger_load_begins_without_drafts_where_a_smaller_one_runs_without() -> None:
    gate = LoadGate()
    run(gate, 4, 100, lambda drafts: 6.0 if drafts else 1.0)
    assert not any(run(gate, 60, 300, lambda drafts: 6.0 if drafts else 1.0))
    # A smaller one is no larger one's business.
    assert any(run(gate, 2, 16, lambda drafts: 2.0 if drafts else 1.0))


def test_a_trial_that_is_clear_is_short_and_its_gains_are_looked_at_again() -> None:
    gate = LoadGate()
    run(gate, 16, 100, lambda drafts: 6.0 if drafts else 1.0)
    lucky = iter([0.1] * 4)
    assert sum(run(gate, 16, 1200, lambda drafts: next(lucky, 6.0) if drafts else 1.0)) <= 12
    assert sum(run(gate, 16, 4000, lambda drafts: 6.0 if drafts else 1.0)) <= 8


def test_plain_rounds_come_first_and_often_enough_to_be_recorded() -> None:
    drafted = run(LoadGate(), 16, 96, lambda drafts: 2.0 if drafts else 1.0)
    assert not any(drafted[:12])
    assert drafted.count(False) >= 64


def test_rows_that_come_and_go_within_a_load_say_nothing_of_drafts() -> None:
    """A round of more rows takes longer, and is not compared with what the other kind took for fewer."""
    gate = LoadGate()
    drafted: list[bool] = []
    for _ in range(10):
        drafted += run(gate, 33, 150, lambda drafts: 33 * (3.5 if drafts else 1.0))
        drafted += run(gate, 64, 150, lambda drafts: 64 * (3.5 if drafts else 1.0))
    assert sum(drafted[64:]) < 20


def test_a_single_row_is_left_to_the_control() -> None:
    gate = LoadGate()
    assert all(run(gate, 1, 300, lambda drafts: 9.0 if drafts else 1.0))


def test_only_as_many_rows_as_pay_have_drafts(model: PreTrainedModel) -> None:
    engine = Stepped(selfspec.wrap(model, "exit:1", draft_length=3))
    decoder = engine._decoder
    decoder._drafting = {greedy: replace(each, most_rows=2) for greedy, each in decoder._drafting.items()}
    for rows in (3, 2):
        before = engine.scheduler.stats()
        seen = [engine.submit(RowRequest(text_of(4, number), 12, ENDLESS)) for number in range(rows)]
        engine.run()
        after = engine.scheduler.stats()
        assert (after.drafted == before.drafted) == (after.plain_rounds - before.plain_rounds == 12) == (rows == 3)
        assert {len(each.tokens) for each in seen} == {12}


def test_a_row_that_wants_no_draft_has_none(model: PreTrainedModel) -> None:
    engine = Stepped(selfspec.wrap(model, "exit:1", draft_length=3))
    requests = [RowRequest(text_of(4, number), 12, ENDLESS, drafts=number != 1) for number in range(3)]
    seen = [engine.submit(request) for request in requests]
    engine.run()
    for request, each in zip(requests, seen, strict=True):
        assert each.tokens == alone(model, Asked(request))
        rounds = [event.drafted for event in each.events if isinstance(event, Committed)]
        assert (sum(rounds) > 0) is request.drafts
    assert engine.scheduler.stats().plain_rounds >= 12


def test_rows_that_come_and_go_are_judged_by_what_they_gain_on_average() -> None:
    costs = Costs(draft=0.1, widening=0.01)
    controller = selfspec.CostAware().begin_by_load(costs)
    together = selfspec.CostAware().begin(costs)
    assert together.keeps_lockstep()
    assert not controller.keeps_lockstep()

    draft = Draft.chain(torch.zeros(4, 3, dtype=torch.long), steps=3)
    # Three rows accept all, and the fourth nothing: in one generation it ends the batch.
    outcomes = [outcome(3, 3, 4)] * 3 + [outcome(1, 0, 1)]
    for each in (controller, together):
        for _ in range(40):
            each.budget(50, [True] * 4)
            each.learn(draft, outcomes)
    assert controller._model.rate > 1.5 > together._model.rate  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["exit", "none"])
def test_predictions_draft_at_any_load_and_change_no_row(model: PreTrainedModel, name: str) -> None:
    rows = [replace(asked(4, 40, number), seed=number) for number in range(3)]
    texts = [tuple(alone(model, Asked(row))) for row in rows]
    predicted = [replace(row, prediction=(*text[:9], 3, 3, *text[11:])) for row, text in zip(rows, texts, strict=True)]
    engine = Stepped(selfspec.wrap(model, DRAFTS[name]), 3)
    plain = [engine.submit(row) for row in rows]
    engine.run()
    before = engine.scheduler.stats().rounds
    seen = [engine.submit(row) for row in (*predicted[:2], rows[2])]
    engine.run()
    assert [tuple(each.tokens) for each in (*plain, *seen)] == texts * 2
    last = [event for event in seen[0].events if isinstance(event, Committed)][-1]
    assert last.predicted > 20
    assert 0 < last.mispredicted < 30
    assert engine.scheduler.stats().rounds - before < before


def test_a_prediction_saves_as_many_rounds_as_in_generate(model: PreTrainedModel) -> None:
    spec, row = selfspec.wrap(model), asked(4, 80)
    ids = torch.tensor([row.input_ids])
    options: dict[str, Any] = {"max_new_tokens": 80, **GREEDY}
    text = spec.generate(ids, **options).sequences[0, 4:].tolist()
    predicted = (*text[:20], 3, 4, 5, *text[20:40], *text[43:])
    out = spec.generate(ids, prediction=predicted, **options)
    engine = Stepped(spec, 1)
    seen = engine.submit(replace(row, prediction=predicted))
    engine.run()
    assert seen.tokens == text
    assert engine.scheduler.stats().rounds == out.stats.rounds < 30
