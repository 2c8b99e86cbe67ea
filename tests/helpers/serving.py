"""Requests that come, go, are cancelled and fail, run step by step without a thread; and what each is alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.decode.group import Group
from selfspec.serve.cache_budget import CacheBudget
from selfspec.serve.events import Committed, Event, Finished, Ticket
from selfspec.serve.row_decoder import RowDecoder
from selfspec.serve.row_request import OccurrencePenalty, RowRequest
from selfspec.serve.scheduler import Entry, Scheduler


class Stepped:
    """An engine without its thread; its cache has room for `tokens` committed tokens, if one row had them all."""

    def __init__(
        self,
        spec: selfspec.SelfSpeculative,
        max_rows: int = 4,
        prefill_tokens: int = 16,
        tokens: int | None = None,
        margin: int = 0,
        kept: bool = False,
    ) -> None:
        decoder = RowDecoder(spec.joining_rows())
        sizes = decoder.measured()
        bound = sizes.of(1, tokens) if tokens else sizes.of(max_rows + 1, 256)
        self.budget = CacheBudget(sizes, bound, max_rows, margin)
        self.scheduler = Scheduler(decoder, self.budget, prefill_tokens, bound if kept else 0)
        self.vocabulary = spec.model.get_input_embeddings().weight.shape[0]
        self.most_bytes = 0
        self._decoder = decoder
        self._arrivals = 0

    def submit(self, request: RowRequest) -> Seen:
        return self.submit_row(self._decoder.row(request), request.drafts)

    def submit_row(self, row: Group, drafts: bool = True) -> Seen:
        seen = Seen()
        assert row.longest <= self.budget.longest
        self.scheduler.add(Entry(self._arrivals, seen.ticket, row, row.length, drafts))
        self._arrivals += 1
        return seen

    def step(self) -> None:
        self.scheduler.step()
        self.most_bytes = max(self.most_bytes, self.scheduler.stats().cache_bytes + self.scheduler.stats().kept_bytes)

    def run(self) -> None:
        for _ in range(5000):
            if not self.scheduler.busy:
                return
            self.step()
        raise AssertionError("rows do not come to their end")


class Seen:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ticket = Ticket(self.events.append)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Committed) for token in event.tokens]

    @property
    def end(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        assert not any(isinstance(event, Finished) for event in self.events[:-1])
        return last


class Alternating(LogitsProcessor):
    """Has memory: bans even tokens at every other call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % 2 :: 2] -= 3.0
        return scores


class Repelled(LogitsProcessor):
    """Remembers nothing: lowers the two tokens before."""

    stateless = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_add(1, input_ids[:, -2:], torch.full_like(scores[:, : min(2, input_ids.shape[1])], -2.0))


class Breaking(LogitsProcessor):
    """Raises where a text has reached a length. With memory it is called for committed tokens alone."""

    def __init__(self, length: int, stateless: bool) -> None:
        self.length = length
        self.stateless = stateless

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self.length:
            raise ArithmeticError("this processor breaks here")
        return scores


@dataclass(frozen=True)
class Asked:
    """A request, what makes its processors for each run, the new tokens after which one of these raises, and before
    which steps the request arrives and is cancelled.
    """

    request: RowRequest
    made: tuple[Callable[[], LogitsProcessor], ...] = ()
    breaks: int | None = None
    arrives: int = 0
    cancelled: int | None = None

    def fresh(self) -> RowRequest:
        return replace(self.request, options=self.options(*(make() for make in self.made)))

    def options(self, *more: LogitsProcessor) -> dict[str, Any]:
        own = self.request.options
        return {**own, "logits_processor": [*own.get("logits_processor", ()), *more]}


def alone(model: PreTrainedModel, asked: Asked) -> list[int]:
    """What `generate` gives for a request alone, plain and with the seed of the request; nothing of it breaks."""
    request, made = asked.request, [make() for make in asked.made]
    options = asked.options(*(each for each in made if not isinstance(each, Breaking)))
    prompt = torch.tensor([request.input_ids])
    out = selfspec.wrap(model, runtime=selfspec.runtime.Eager()).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=request.max_new_tokens,
        seed=request.seed,
        accept="coupled",
        pad_token_id=0,
        **{"eos_token_id": None, **options},
    )
    tokens: list[int] = out.sequences[0, prompt.shape[1] : prompt.shape[1] + out.lengths[0]].tolist()
    return tokens if asked.breaks is None else tokens[: asked.breaks]


def random_requests(rng: random.Random, count: int, vocabulary: int, most: int) -> list[Asked]:
    """Requests of every kind; prompt and new tokens of each are at most `most`."""
    return [_random_request(rng, vocabulary, most) for _ in range(count)]


def _random_request(rng: random.Random, vocabulary: int, most: int) -> Asked:
    prompt = tuple(rng.randrange(vocabulary) for _ in range(rng.randint(1, most // 2)))
    new = rng.randint(1, most - len(prompt))
    made: list[Callable[[], LogitsProcessor]] = []
    if rng.random() < 0.15:
        made.append(Alternating)
    if rng.random() < 0.15:
        made.append(Repelled)
    breaks = rng.randint(0, new) if rng.random() < 0.12 else None
    if breaks is not None:
        length, stateless = len(prompt) + breaks, rng.random() < 0.5
        made.append(lambda: Breaking(length, stateless))
    greedy = rng.random() < 0.5
    options: dict[str, Any] = {"do_sample": not greedy, "repetition_penalty": 1.3 if rng.random() < 0.15 else 1.0}
    if not greedy:
        options["temperature"] = rng.choice([0.7, 1.0, 1.3])
        options["top_k"] = 0 if rng.random() < 0.6 else rng.randint(2, 9)
        options |= {"top_p": 0.8} if rng.random() < 0.3 else {}
        options |= {"min_p": 0.05} if rng.random() < 0.2 else {}
    options |= {"sequence_bias": {(rng.randrange(vocabulary),): 4.0}} if rng.random() < 0.2 else {}
    presence, frequency = (each if rng.random() < 0.2 else 0.0 for each in (0.7, 0.4))
    options["logits_processor"] = [OccurrencePenalty(len(prompt), presence, frequency)]
    if rng.random() < 0.5:
        options["eos_token_id"] = rng.sample(range(vocabulary), 3)
    arrives = rng.choice([0, 0, rng.randint(0, 20)])
    cancelled = arrives + rng.randint(0, 12) if rng.random() < 0.12 else None
    logprobs = 2 if rng.random() < 0.1 else None
    request = RowRequest(prompt, new, options, rng.randrange(1000), logprobs)
    return Asked(request, tuple(made), breaks, arrives, cancelled)


def check_mix(model: PreTrainedModel, engine: Stepped, asked: list[Asked]) -> None:
    """Every row is what it is alone, up to where it was cancelled or broke; nothing is left over."""
    rows: dict[int, Seen] = {}
    for step in range(5000):
        for number, each in enumerate(asked):
            if each.arrives == step:
                rows[number] = engine.submit(each.fresh())
            if each.cancelled == step and number in rows:
                rows[number].ticket.cancel()
        if len(rows) == len(asked) and not engine.scheduler.busy:
            break
        engine.step()
    for number, each in enumerate(asked):
        seen = rows[number]
        end, expected = seen.end, alone(model, each)
        stopped = bool(expected) and expected[-1] in each.request.options.get("eos_token_id", ())
        assert (end.prompt_tokens, end.completion_tokens) == (len(each.request.input_ids), len(seen.tokens))
        assert end.accepted <= end.drafted
        broke = len(expected) == each.breaks and len(expected) < each.request.max_new_tokens and not stopped
        if end.reason == "cancelled":
            assert each.cancelled is not None
            assert seen.tokens == expected[: len(seen.tokens)]
        elif end.reason == "error":
            assert broke
            assert isinstance(end.error, selfspec.errors.RowError)
            assert isinstance(end.error.__cause__, ArithmeticError)
            # Tokens of the round that broke are not committed where the processor has memory.
            assert seen.tokens == expected[: len(seen.tokens)]
        else:
            assert not broke
            assert seen.tokens == expected
            assert end.reason == ("stop" if stopped else "length")
        logprobs = [event.logprobs for event in seen.events if isinstance(event, Committed)]
        assert all((found is None) == (each.request.logprobs is None) for found in logprobs)
    stats = engine.scheduler.stats()
    assert (stats.running, stats.prefilling, stats.waiting, stats.cache_bytes) == (0, 0, 0, 0)
    assert engine.most_bytes <= engine.budget.bound
    assert sum(stats.finished.values()) == len(asked)
    assert stats.committed == sum(len(seen.tokens) for seen in rows.values())


def small(**options: Any) -> PreTrainedModel:
    return tiny.llama(vocab_size=24, num_hidden_layers=3, hidden_size=16, intermediate_size=16, **options)


def assert_joining_rows_are_stock(spec: selfspec.SelfSpeculative, prompts: Sequence[tuple[int, ...]]) -> None:
    """Rows that join and leave, four at a time, are what `model.generate` gives for their prompts alone."""
    engine, greedy = Stepped(spec, 4, 8), {"do_sample": False}
    seen = [engine.submit(RowRequest(each, 3 + 2 * number, greedy)) for number, each in enumerate(prompts)]
    engine.run()
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for number, (prompt, each) in enumerate(zip(prompts, seen, strict=True)):
        ids = torch.tensor([prompt], device=spec.model.device)
        whole = spec.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3 + 2 * number, **options)
        assert list(each.tokens) == whole[0, len(prompt) :].tolist()
