"""The engine: every row is what `generate` makes of it alone, whatever comes and goes beside it; and tickets.

Where rotary tables change with the length, a row is read again and goes on as `model.generate`.
A server in a process of its own stops when it is told to, while something in it does not end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

import selfspec
from helpers import tiny
from helpers.drafting import stock
from helpers.saved_folders import checkpoint_folder
from helpers.serving import Alternating, Asked, Stepped, alone, small
from helpers.shrunken import shrunken
from selfspec.cache.shared_layer import CacheKind
from selfspec.decode.generation import Limits
from selfspec.errors import CannotFitError, ClosedError, EngineStoppedError, QueueFullError, UnsupportedOptionError
from selfspec.serve.engine import Engine
from selfspec.serve.events import Committed, Event, Finished, Ticket
from selfspec.serve.row_decoder import RowDecoder
from selfspec.serve.row_request import RowRequest

GREEDY = {"do_sample": False}
LONG = RowRequest((1, 2), 120, GREEDY)
SHORT = RowRequest((1, 2), 4)


def request(number: int) -> RowRequest:
    prompt = tuple(tiny.prompt(3 + number % 7, seed=number, vocabulary=24)[0].tolist())
    drawn = {"do_sample": True, "temperature": 0.8, "top_k": 0}
    return RowRequest(prompt, 4 + number % 9, GREEDY if number % 3 else drawn, number)


def test_requests_come_from_many_threads() -> None:
    model, asked = small(), [request(number) for number in range(24)]
    spec = selfspec.wrap(model, "lookup+exit:1", draft_length=3)
    with Engine(spec, max_rows=4) as engine, ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda each: engine.submit(each).tokens(60), asked))
    assert answers == [alone(model, Asked(each)) for each in asked]
    assert engine.stats().finished == {"length": 24}


def test_an_engine_takes_requests_while_it_runs_and_never_else() -> None:
    engine = Engine(selfspec.wrap(small()))
    with pytest.raises(EngineStoppedError, match="was not started"):
        engine.submit(request(0))
    with engine:
        assert engine.running
        engine.submit(request(0))
        with pytest.raises(EngineStoppedError, match="started before"):
            engine.start()
    assert not engine.running
    with pytest.raises(EngineStoppedError, match="is stopped"):
        engine.submit(request(0))
    engine.stop()


def test_what_was_submitted_runs_to_its_end_where_the_engine_drains() -> None:
    model, asked = small(), [request(number) for number in range(6)]
    engine = Engine(selfspec.wrap(model), max_rows=2)
    engine.start()
    tickets = [engine.submit(each) for each in asked]
    engine.stop(drain=True)
    assert all(ticket.finished for ticket in tickets)
    assert [ticket.tokens(1) for ticket in tickets] == [alone(model, Asked(each)) for each in asked]


@pytest.mark.parametrize(("count", "how"), [(6, {"drain": False}), (30, {"drain": True, "timeout": 0.05})])
def test_rows_end_with_an_error_where_the_engine_does_not_drain_or_not_in_time(count: int, how: Any) -> None:
    engine = Engine(selfspec.wrap(small()), max_rows=1 if how["drain"] else 2)
    engine.start()
    tickets = [engine.submit(LONG) for _ in range(count)]
    engine.stop(**how)
    assert all(ticket.finished is not None for ticket in tickets)
    cut_off = tickets[-1:] if how["drain"] else tickets
    assert all(isinstance(ticket.finished and ticket.finished.error, EngineStoppedError) for ticket in cut_off)
    assert engine.stats().cache_bytes == 0


def test_an_error_in_the_with_block_stops_the_engine_at_once() -> None:
    engine = Engine(selfspec.wrap(small()))
    tickets: list[Ticket] = []

    def fail() -> None:
        tickets.append(engine.submit(LONG))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), engine:
        fail()
    assert tickets[0].finished is not None


def test_more_than_may_wait_are_refused() -> None:
    engine = Engine(selfspec.wrap(small()), max_rows=1, max_waiting=2)
    # Nobody takes them from the queue.
    engine._thread = threading.Thread()
    engine.submit(request(0))
    engine.submit(request(1))
    with pytest.raises(QueueFullError, match="2 requests wait"):
        engine.submit(request(2))
    assert engine.stats().waiting == 2
    engine._thread = None
    engine.stop()
    assert engine.stats().finished == {"error": 2}


def test_no_end_token_means_none() -> None:
    model = small()
    model.generation_config.eos_token_id = list(range(24))
    engine = Stepped(selfspec.wrap(model))
    own, never = engine.submit(SHORT), engine.submit(replace(SHORT, options={"eos_token_id": None}))
    engine.run()
    assert own.end.reason == "stop"
    assert len(own.tokens) == 1
    assert never.end.reason == "length"


def test_defaults_are_those_of_generate() -> None:
    model = small()
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.5
    spec = selfspec.wrap(model)
    engine = Stepped(spec)
    seen = engine.submit(replace(SHORT, max_new_tokens=12, seed=4))
    engine.run()
    prompt = torch.tensor([SHORT.input_ids])
    out = spec.generate(prompt, torch.ones_like(prompt), max_new_tokens=12, seed=4, accept="coupled", pad_token_id=0)
    assert seen.tokens == out.sequences[0, 2:].tolist()


@pytest.mark.parametrize("processors", [(), "memory"])
def test_log_probabilities_are_those_of_the_models_own_logits(processors: Any) -> None:
    model = small()
    made = (Alternating(),) if processors else ()
    engine = Stepped(selfspec.wrap(model, "exit:1", draft_length=3))
    drawn = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 3,
        "sequence_bias": {(3,): 2.0},
        "logits_processor": [*made],
    }
    seen = engine.submit(RowRequest((1, 2), 12, drawn, 1, logprobs=4))
    engine.submit(RowRequest((3, 2, 1), 9, GREEDY))
    engine.run()
    text = torch.tensor([[1, 2, *seen.tokens]])
    with torch.no_grad():
        expected = model(text).logits[0, 1:-1].log_softmax(-1)
    found = [each for event in seen.events if isinstance(event, Committed) for each in event.logprobs or ()]
    assert len(found) == 12
    for place, (each, token) in enumerate(zip(found, seen.tokens, strict=True)):
        assert each.logprob == pytest.approx(float(expected[place, token]), abs=1e-5)
        best = expected[place].topk(4)
        assert [token for token, _ in each.top] == best.indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("kept", ["int8", "host"])
def test_keys_and_values_kept_in_other_ways_are_refused_by_name(kept: CacheKind) -> None:
    spec = selfspec.wrap(small())
    spec.limits = Limits(context=64, at_once=64, cache=kept)
    with pytest.raises(UnsupportedOptionError, match=f"without cache='{kept}'"):
        Engine(spec)
    spec.unwrap()
    with pytest.raises(ClosedError):
        Engine(spec)


def test_what_can_never_fit_is_refused_with_the_remedy() -> None:
    spec = selfspec.wrap(small())
    sizes = RowDecoder(spec.joining_rows()).measured()
    with Engine(spec, cache_bytes=sizes.of(1, 20)) as engine:
        with pytest.raises(CannotFitError, match=r"20 tokens; ask for fewer, or raise cache_bytes"):
            engine.submit(RowRequest((1, 2, 3), 18))
        assert len(engine.submit(RowRequest((1, 2, 3), 17)).tokens(30)) == 17


def test_an_engine_that_breaks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(selfspec.wrap(small()))
    monkeypatch.setattr(engine._scheduler, "step", Mock(side_effect=AssertionError("a bug")))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine.start()
    ticket = engine.submit(request(0))
    with pytest.raises(EngineStoppedError):
        ticket.tokens(30)
    thread: Any = engine._thread
    thread.join(10)
    with pytest.raises(EngineStoppedError, match="broke: a bug"):
        engine.submit(request(0))
    engine.stop()


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba"])
def test_models_of_states_alone_are_served(name: str) -> None:
    model, asked = shrunken(name, vocab_size=24), [request(number) for number in range(5)]
    spec = selfspec.wrap(model, "lookup")
    stepped = Stepped(spec, 2)
    seen = [stepped.submit(each) for each in asked]
    stepped.step()
    assert stepped.scheduler.stats().running == 2
    stepped.run()
    assert [each.tokens for each in seen] == [alone(model, Asked(each)) for each in asked]
    engine = Engine(spec)
    assert engine.longest == 1 << 20
    one = engine._budget.sizes.of(1, 1)
    assert Engine(spec, cache_bytes=one).longest == 1 << 20
    with pytest.raises(UnsupportedOptionError, match="no room for one token"):
        Engine(spec, cache_bytes=one - 1)


def test_no_thread_that_lives_ran_the_model_before_the_engine_does() -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
    seen: set[threading.Thread] = set()
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: seen.add(threading.current_thread()))
    Engine(selfspec.wrap(model))
    assert seen
    assert not any(thread.is_alive() for thread in seen)


ROUND = Committed((1, 2), None, 3, 1)
END = Finished("stop", None, 4, 2, 3, 1)


def test_events_come_in_order_and_end_with_the_last() -> None:
    ticket, another = Ticket(), Ticket()
    with pytest.raises(TimeoutError):
        next(ticket.events(timeout=0.01))
    assert ticket.finished is None
    for event in (ROUND, ROUND, END):
        ticket.deliver(event)
        another.deliver(event)
    assert list(ticket.events(timeout=1)) == [ROUND, ROUND, END]
    assert another.tokens(timeout=1) == [1, 2, 1, 2]
    assert ticket.finished is END
    assert not ticket.cancelled
    ticket.cancel()
    assert ticket.cancelled
    # A callback takes the place of the iterator.
    seen: list[Event] = []
    ticket = Ticket(seen.append)
    ticket.deliver(ROUND)
    ticket.deliver(END)
    assert seen == [ROUND, END]
    assert ticket.finished is END
    with pytest.raises(RuntimeError, match="on_event"):
        next(ticket.events())


CHANGE = 64
ENDLESS = {**GREEDY, "eos_token_id": None}


@pytest.mark.parametrize("draft", ["lookup+exit:1", "none"])
def test_rows_on_both_sides_of_the_place_and_across_it_are_what_they_are_alone(draft: str) -> None:
    tables = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": CHANGE}
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    sizes: dict[str, Any] = {"max_position_embeddings": 256, "original_max_position_embeddings": CHANGE}
    model = shrunken("phi3", vocab_size=512, initializer_range=0.3, rope_parameters=tables | factors, **sizes)
    spec = selfspec.wrap(model, draft=draft, draft_length=3)
    lengths = (50, CHANGE + 1, 20, CHANGE - 1, CHANGE, 30, CHANGE + 2, 100, 62)
    drawn = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(3, 512, (length,), generator=drawn).tolist()) for length in lengths]
    with selfspec.Engine(spec, prefill_tokens=16, max_rows=4, cache_bytes=2**26) as engine:
        tickets = [engine.submit(RowRequest(text, 30, ENDLESS)) for text in prompts]
        found = [ticket.tokens(timeout=60) for ticket in tickets]
        # What is kept of one side serves texts of that side alone.
        again = [(*prompts[0], *found[0], 5), (*prompts[7][:70], 5), (*prompts[7][:40], 5), (*prompts[2], 5)]
        repeated = [engine.submit(RowRequest(text, 8, ENDLESS)).tokens(timeout=60) for text in again]
        assert engine.stats().cached_tokens > 0
    spec.unwrap()
    for text, answer in zip([*prompts, *again], [*found, *repeated], strict=True):
        assert [*text, *answer] == stock(model, torch.tensor([text]), len(answer))[0].tolist()
    assert list(map(len, found + repeated)) == [30] * len(prompts) + [8] * len(again)


# A prompt of text is never read to its end, and no pass over one of token ids ends.
PROGRAM = """
import gc, sys, threading
from selfspec.cli.app import main
from selfspec.serve.scheduler import Scheduler
from selfspec.serve.served import Served
wait = threading.Event().wait
Served.check_text = lambda *_: wait()

def step(_):
    print(gc.get_freeze_count(), flush=True)
    wait()

Scheduler.step = step
sys.exit(main())
"""
PROMPTS = ("Once", [1, 3])


@contextmanager
def stuck(seconds: float, log: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A server with requests that never come to their end; its log is a file, or in a pipe."""
    words = ["serve", str(checkpoint_folder()), "--port", "0", "--name", "stories", "--output", "json"]
    with ExitStack() as files:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words, "--stop-seconds", str(seconds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if log is None else files.enter_context(log.open("w")),
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert process.stdout is not None
    try:
        port = int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
        with ExitStack() as connections:
            for prompt in PROMPTS:
                connection = connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
                body = json.dumps({"model": "stories", "prompt": prompt, "stream": True}).encode()
                head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(0.5)
            yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.tools
def test_sigterm_ends_the_process_in_time_whatever_runs() -> None:
    with stuck(2) as process:
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        frozen, log = process.communicate(timeout=20)
    assert time.monotonic() - begun < 3
    assert process.returncode == 0
    assert [json.loads(line) for line in log.splitlines()][-1]["message"].startswith("something still ran")
    # What was loaded is not looked through again amid requests.
    assert int(frozen) > 100_000


@pytest.mark.tools
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_behind_stderr_stops_no_server() -> None:
    with stuck(1, Path("/dev/full")) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.tools
def test_a_second_interrupt_ends_it_at_once_and_writes_no_traceback() -> None:
    with stuck(60) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=5)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in log
