"""What holds of every runtime that makes programs: in and out of inference mode, in threads, after weights changed."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.captures import Interpreted, StandIn
from helpers.proving import check_inference_mode, greedy_together, ticking
from selfspec.runtime import Runtime, Traced
from selfspec.runtime.graph_cache import GraphCache

PROMPT, NEW = 5, 20
RUNTIMES: dict[str, Runtime] = {"traced": Traced(after=0), "graphs": StandIn(0, 8), "compiled": Interpreted(0)}


@pytest.fixture(params=RUNTIMES)
def spec(request: pytest.FixtureRequest, llama: PreTrainedModel) -> selfspec.SelfSpeculative:
    found = selfspec.wrap(llama, selfspec.EarlyExit(1), draft_length=1, runtime=RUNTIMES[request.param])
    found.programs = GraphCache(found.runtime, ticking())
    return found


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_may_come_and_go(spec: selfspec.SelfSpeculative, first: bool) -> None:
    check_inference_mode(spec, PROMPT, NEW, first)


def test_threads_share_programs(spec: selfspec.SelfSpeculative) -> None:
    prompts = [tiny.prompt(PROMPT, seed=seed) for seed in range(3)]
    expected = [spec.model.generate(prompt, max_new_tokens=NEW, do_sample=False).tolist() for prompt in prompts]
    assert greedy_together(spec, prompts, NEW) == expected


def test_other_weights_are_noticed(spec: selfspec.SelfSpeculative) -> None:
    model, prompt = spec.model, tiny.prompt(PROMPT)
    for _ in range(2):
        expected = model.generate(prompt, max_new_tokens=NEW, do_sample=False).tolist()
        assert spec.generate(prompt, max_new_tokens=NEW, do_sample=False).sequences.tolist() == expected
        assert spec.programs.proved
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(-3)
