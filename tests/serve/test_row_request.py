"""Requests are checked when they are submitted: what cannot be honoured is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import selfspec
from helpers.serving import Alternating, Stepped, small
from selfspec.serve.engine import Engine
from selfspec.serve.events import Committed
from selfspec.serve.row_request import RowRequest, SamplingParams

PLAIN = RowRequest((1, 2), 4)


def test_no_end_token_means_none() -> None:
    model = small()
    model.generation_config.eos_token_id = list(range(24))
    engine = Stepped(selfspec.wrap(model))
    own, never = engine.submit(PLAIN), engine.submit(replace(PLAIN, eos=frozenset()))
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
    seen = engine.submit(replace(PLAIN, max_new_tokens=12, sampling=SamplingParams(seed=4)))
    engine.run()
    prompt = torch.tensor([PLAIN.input_ids])
    out = spec.generate(prompt, torch.ones_like(prompt), max_new_tokens=12, seed=4, accept="coupled", pad_token_id=0)
    assert seen.tokens == out.sequences[0, 2:].tolist()


@pytest.mark.parametrize("processors", [(), "memory"])
def test_log_probabilities_are_those_of_the_models_own_logits(processors: Any) -> None:
    model = small()
    made = (Alternating(),) if processors else ()
    engine = Stepped(selfspec.wrap(model, "exit:1", draft_length=3))
    sampling = SamplingParams(temperature=0.7, top_k=3, seed=1, logit_bias={3: 2.0}, processors=made)
    seen = engine.submit(RowRequest((1, 2), 12, sampling, logprobs=4))
    engine.submit(RowRequest((3, 2, 1), 9, SamplingParams(temperature=0.0)))
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


def test_what_cannot_be_served_is_refused_when_the_engine_is_made() -> None:
    model = small()
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match=r"cache_bytes=10 .* one token"):
        Engine(selfspec.wrap(model), cache_bytes=10)
    spec = selfspec.wrap(model)
    spec.unwrap()
    with pytest.raises(selfspec.errors.ClosedError):
        Engine(spec)
