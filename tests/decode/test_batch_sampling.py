"""Logits become the probabilities plain decoding would draw from, and draws follow their weights."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec.decode.group import Group, Sampling
from selfspec.decode.noise import Noise
from selfspec.decode.processors import Warping
from selfspec.decode.sampling import BatchSampling, proper
from selfspec.decode.sequences import Sequences
from selfspec.decode.stopping import Stopping


def sampling_of(warpers: LogitsProcessorList, greedy: bool, rows: int) -> BatchSampling:
    prompts, noise = torch.empty(rows, 0, dtype=torch.long), Noise(0, range(rows), torch.device("cpu"))
    return BatchSampling([Group(Sequences(prompts, pad=0), Sampling(Warping(warpers), greedy), Stopping(1), noise)])


def test_greedy_is_one_hot_at_the_first_largest_logit() -> None:
    logits = torch.tensor([[[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]]], dtype=torch.float64)
    expected = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])
    sampling = sampling_of(LogitsProcessorList(), greedy=True, rows=1)
    assert torch.equal(sampling.probabilities(sampling.scores(logits)), expected)


def test_every_position_of_a_block_is_warped_as_if_alone() -> None:
    warpers = LogitsProcessorList(
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(7), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)]
    )
    logits = torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(0))
    sampling = sampling_of(warpers, greedy=False, rows=3)
    block = sampling.probabilities(sampling.scores(logits))
    for row in range(3):
        for position in range(4):
            alone = warpers(torch.empty(1, 0, dtype=torch.long), logits[row, position][None]).softmax(-1)[0]
            torch.testing.assert_close(block[row, position], alone)
    assert (block == 0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_probabilities_are_those_of_float32_logits_whatever_their_dtype(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    sampling = sampling_of(LogitsProcessorList(), greedy=False, rows=2)
    found = sampling.probabilities(sampling.scores(logits))
    torch.testing.assert_close(found, logits.float().softmax(-1), rtol=1e-6, atol=0.0)


def test_a_draft_distribution_that_is_not_finite_becomes_uniform() -> None:
    q = torch.tensor([[0.5, 0.5, 0.0], [float("nan"), 0.5, 0.5], [float("inf"), 0.0, 0.0]])
    mended = proper(q)
    assert torch.equal(mended[0], q[0])
    torch.testing.assert_close(mended[1:], torch.full((2, 3), 1 / 3))
