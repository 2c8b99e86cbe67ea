"""Graphs, by a stand-in: the stock text, in and out of inference mode, in threads, after weights changed."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.captures import StandIn
from helpers.proving import check_inference_mode, greedy_together, ragged_samples, wrapped
from helpers.snapshot import Snapshot
from helpers.tiny import in_turns
from selfspec.runtime import Eager

PROMPT, NEW = 5, 24
GRAPHS = StandIn(0, 8)
DRAFTS: dict[str, selfspec.drafts.Drafter | None] = {
    "plain": None,
    "exit": selfspec.drafts.EarlyExit(1),
    "sublayers": selfspec.drafts.LayerSkip(attention=[1], mlp=[2]),
    "layers": selfspec.drafts.LayerSkip(layers=[0, 2]),
    "look-up": selfspec.drafts.PromptLookup(),
    "int8": selfspec.drafts.LowPrecision(),
}


@pytest.mark.parametrize(
    ("architecture", "kernel", "draft"), in_turns(sorted(tiny.BUILDERS), ("sdpa", "eager"), tuple(DRAFTS))
)
def test_greedy_text_is_the_stock_models(architecture: str, kernel: str, draft: str) -> None:
    model = tiny.BUILDERS[architecture](attention=kernel)
    before = Snapshot(model)
    prompt = tiny.prompt(PROMPT)
    spec = wrapped(model, GRAPHS, DRAFTS[draft])
    found = spec.generate(prompt, max_new_tokens=NEW, do_sample=False).sequences
    assert found.tolist() == model.generate(prompt, max_new_tokens=NEW, do_sample=False).tolist()
    assert spec.programs.proved
    assert all(kind.padded for kind in spec.programs.proved)
    assert not spec.programs.refusals
    before.assert_same(model)


@pytest.mark.statistical
@pytest.mark.parametrize("draft", DRAFTS)
def test_samples_of_a_ragged_batch_are_those_of_the_stock_modules(architecture: str, draft: str) -> None:
    model = tiny.BUILDERS[architecture]()
    tokens: list[list[list[int]]] = []
    for each in (Eager(), GRAPHS):
        spec = wrapped(model, each, DRAFTS[draft])
        tokens.append(ragged_samples(spec, PROMPT, NEW))
    assert tokens[0] == tokens[1]
    assert any(not kind.uniform for kind in spec.programs.proved)


@pytest.fixture
def spec(llama: PreTrainedModel) -> selfspec.SelfSpeculative:
    return wrapped(llama, GRAPHS, selfspec.drafts.EarlyExit(1))


@pytest.mark.contract
@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_may_come_and_go(spec: selfspec.SelfSpeculative, first: bool) -> None:
    check_inference_mode(spec, PROMPT, NEW, first)


@pytest.mark.contract
def test_threads_share_programs(spec: selfspec.SelfSpeculative) -> None:
    prompts = [tiny.prompt(PROMPT, seed=seed) for seed in range(3)]
    expected = [spec.model.generate(prompt, max_new_tokens=NEW, do_sample=False).tolist() for prompt in prompts]
    assert greedy_together(spec, prompts, NEW) == expected


@pytest.mark.contract
def test_other_weights_are_noticed(spec: selfspec.SelfSpeculative) -> None:
    model, prompt = spec.model, tiny.prompt(PROMPT)
    for _ in range(2):
        expected = model.generate(prompt, max_new_tokens=NEW, do_sample=False).tolist()
        assert spec.generate(prompt, max_new_tokens=NEW, do_sample=False).sequences.tolist() == expected
        assert spec.programs.proved
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(-3)
