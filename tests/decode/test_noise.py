"""Coupled decoding: the noise of a place makes sampled tokens independent of the draft, and still exact samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.goodness import p_value
from selfspec.decode.noise import Coupling


def test_choices_follow_the_weights() -> None:
    weights = torch.tensor([5.0, 0.0, 1.0, 2.0, 0.5]).expand(50, 800, 5)
    chosen = Coupling(3).choose(weights, torch.arange(800)[None])
    joint: dict[tuple[int, ...], float] = {(token,): float(weight / 8.5) for token, weight in enumerate(weights[0, 0])}
    assert p_value([(token,) for token in chosen.flatten().tolist()], joint) > 0.01


def test_places_are_independent_of_each_other() -> None:
    weights = torch.ones(200, 201, 3)
    chosen = Coupling(0).choose(weights, torch.arange(201)[None])
    uniform: dict[tuple[int, ...], float] = {(a, b): 1 / 9 for a in range(3) for b in range(3)}
    neighbours = torch.stack([chosen[:, :-1], chosen[:, 1:]], -1).flatten(0, 1).tolist()
    rows = torch.stack([chosen[:-1], chosen[1:]], -1).flatten(0, 1).tolist()
    seeds = torch.stack([chosen, Coupling(1).choose(weights, torch.arange(201)[None])], -1).flatten(0, 1).tolist()
    for pairs in (neighbours, rows, seeds):
        assert p_value([tuple(pair) for pair in pairs], uniform) > 0.01


def test_a_choice_depends_on_its_place_alone() -> None:
    weights = torch.rand(3, 6, 11)
    positions = torch.tensor([[4, 5, 6, 7, 8, 9]])
    block = Coupling(9).choose(weights, positions)
    for index in range(6):
        alone = Coupling(9).choose(weights[:, index : index + 1], positions[:, index : index + 1])
        assert torch.equal(alone, block[:, index : index + 1])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(2, 20), st.integers(0, 2**32))
def test_alike_distributions_choose_alike_as_often_as_is_known(vocab: int, seed: int) -> None:
    p, q = torch.rand(2, vocab, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    positions = torch.arange(4000)[None]
    same = Coupling(seed).choose(p.expand(1, 4000, -1), positions) == Coupling(seed).choose(
        q.expand(1, 4000, -1), positions
    )
    variation = 0.5 * float((p - q).abs().sum())
    rate = float(same.double().mean())
    assert (1 - variation) / (1 + variation) - 0.04 <= rate <= 1 - variation + 0.04


DRAFTS = [selfspec.EarlyExit(1), selfspec.LayerSkip(attention=[2], mlp=[0])]


@pytest.mark.parametrize(("draft", "dtype"), [(DRAFTS[0], torch.float64), (DRAFTS[1], torch.float32)], ids=str)
def test_sampled_tokens_equal_plain_decoding_with_the_same_seed(
    architecture: str, draft: selfspec.Drafter, dtype: torch.dtype
) -> None:
    model = tiny.BUILDERS[architecture](dtype=dtype)
    prompts = torch.nn.functional.pad(tiny.prompt(3), (4, 0)), tiny.prompt(7, seed=1)
    mask = torch.tensor([[0] * 4 + [1] * 3, [1] * 7])
    options: dict[str, Any] = {
        "attention_mask": mask,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": None,
        "max_new_tokens": 24,
        "eos_token_id": 5,
        "pad_token_id": 0,
        "accept": "coupled",
    }
    plain = selfspec.wrap(model)
    drafting = selfspec.wrap(model, draft, draft_length=3)
    for seed in range(3):
        expected = plain.generate(torch.cat(prompts), seed=seed, **options).sequences
        assert torch.equal(drafting.generate(torch.cat(prompts), seed=seed, **options).sequences, expected)
    other = plain.generate(torch.cat(prompts), seed=99, **options).sequences
    assert other.shape != expected.shape or not torch.equal(other, expected)


def test_the_acceptance_rate_stands_beside_the_optimal_one(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, selfspec.EarlyExit(3), accept="coupled", draft_length=4)
    stats = spec.generate(
        tiny.prompt(4, batch=32), max_new_tokens=60, do_sample=True, top_k=None, temperature=2.0, seed=0
    ).stats
    assert 0 < stats.acceptance_rate < stats.optimal_acceptance_rate < 1
    assert stats.to_dict()["optimal_acceptance_rate"] == stats.optimal_acceptance_rate


def test_greedy_decoding_is_left_as_it_is(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, selfspec.EarlyExit(3), accept="coupled", draft_length=4)
    expected = llama.generate(tiny.prompt(4), do_sample=False, max_new_tokens=20)
    assert torch.equal(spec.generate(tiny.prompt(4), do_sample=False, max_new_tokens=20).sequences, expected)
