"""Answers on the stand-in for an accelerator: streamed, served, joined by others, and drawn from the joint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import selfspec
from helpers import tiny, tiny_joint
from helpers.accelerator.device import Accelerator
from helpers.http_server import running
from helpers.joints import Warp, holm_rejects, p_value
from helpers.serving import assert_joining_rows_are_stock, small
from helpers.stories import checkpoint_folder

pytestmark = pytest.mark.accelerator


def chunks(spec: selfspec.SelfSpeculative, ids: torch.Tensor, new: int) -> Iterator[list[list[int]]]:
    """What each row has after each round."""
    rows: list[list[int]] = [[] for _ in ids]
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    for chunk in spec.stream(ids, torch.ones_like(ids), **options):
        for row, found in zip(rows, chunk.rows, strict=True):
            row += found.tokens
        yield [list(row) for row in rows]


def test_each_round_of_a_stream_has_the_next_tokens_of_each_row(accelerator: Accelerator) -> None:
    model, ids = tiny.llama(num_hidden_layers=2).to(accelerator.device), tiny.prompt(5, 2).to(accelerator.device)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    expected = expected[:, 5:].tolist()
    spec = selfspec.wrap(model, "lookup+exit:1", draft_length=3, runtime=selfspec.runtime.Eager())
    *before, last = chunks(spec, ids, 9)
    assert last == expected
    assert len(before) > 1
    for rows in before:
        assert all(row == whole[: len(row)] for row, whole in zip(rows, expected, strict=True))


def test_rows_that_join_and_leave_are_what_they_are_alone(accelerator: Accelerator) -> None:
    spec = selfspec.wrap(small().to(accelerator.device), "recycle", draft_length=2, runtime=selfspec.runtime.Eager())
    assert_joining_rows_are_stock(spec, [(1, 2, 3), (4, 5), (6, 7, 8, 9)])


def test_a_server_answers_two_prompts_of_one_request(accelerator: Accelerator) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(), dtype=torch.float64)
    prompts = ["Once upon", "Lily saw a"]
    with running(model=model.to(accelerator.device), draft="exit:3", max_rows=2) as server:
        with accelerator.counted() as counts:
            reply = server.complete(prompt=prompts, max_tokens=5, temperature=0)
        assert reply.status == 200, reply.body
        found = [choice["text"] for choice in reply.body["choices"]]
        assert counts.launches > 100
        for prompt, text in zip(prompts, found, strict=True):
            ids = server.tokenizer(prompt, return_tensors="pt").input_ids.to(accelerator.device)
            own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)[0]
            assert server.tokenizer.decode(own).endswith(prompt + text)


def test_sampled_text_follows_the_joint(accelerator: Accelerator) -> None:
    warp, on_host = Warp(temperature=0.8), tiny_joint.network()
    joint = tiny_joint.joint(on_host, warp)
    ids = torch.tensor([tiny_joint.PROMPT] * 1500).to(accelerator.device)
    options: dict[str, Any] = {
        "max_new_tokens": tiny_joint.TOKENS,
        "eos_token_id": None,
        "pad_token_id": 0,
        **warp.options,
    }
    found = {}
    for rule, length in (("token", selfspec.FixedLength(2, nodes=4)), ("block", 2), ("coupled", 2)):
        model, runtime = tiny_joint.network().to(accelerator.device), selfspec.runtime.Eager()
        spec = selfspec.wrap(model, "exit:1", draft_length=length, accept=rule, runtime=runtime)
        drawn = spec.generate(ids, torch.ones_like(ids), seed=1, **options).sequences[:, len(tiny_joint.PROMPT) :]
        found[rule] = p_value(map(tuple, drawn.tolist()), joint)
    assert holm_rejects(found, 0.01) == []
