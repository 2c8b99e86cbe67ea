"""The engine: every row is what `generate` makes of it alone, whatever comes and goes beside it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.serve.engine import Engine
from selfspec.serve.row_request import RowRequest, RowSampling


def requests(count: int) -> list[RowRequest]:
    """Prompts of different lengths, greedy and with a seed."""
    return [
        RowRequest(
            tuple(tiny.prompt(3 + number % 7, seed=number)[0].tolist()),
            4 + number,
            RowSampling(temperature=0.0 if number % 3 else 0.8, top_k=0, seed=number),
        )
        for number in range(count)
    ]


def alone(model: PreTrainedModel, request: RowRequest) -> list[int]:
    """What `generate` gives for one request, without drafts."""
    sampling = request.sampling
    options = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k}
    prompt = torch.tensor([request.input_ids])
    out = selfspec.wrap(model).generate(
        prompt,
        max_new_tokens=request.max_new_tokens,
        seed=sampling.seed,
        accept="coupled",
        **(options if sampling.temperature else {"do_sample": False}),
    )
    tokens: list[int] = out.sequences[0, prompt.shape[1] :].tolist()
    return tokens


def test_rows_that_come_and_go_are_what_they_are_alone() -> None:
    model, asked = tiny.llama(), requests(12)
    with Engine(selfspec.wrap(model, "exit:2", draft_length=3), max_rows=5, prefill_tokens=8) as engine:
        tickets = [engine.submit(request) for request in asked]
        answers = [ticket.tokens(60) for ticket in tickets]
    assert answers == [alone(model, request) for request in asked]
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.cache_bytes) == (0, 0, 0)
