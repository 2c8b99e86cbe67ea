"""Hybrid and recurrent models: any sequence of rounds leaves the committed text, and nothing of what was rejected."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers.shrunken import shrunken
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache, recurrent_layers
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath, Sublayer, sublayers
from selfspec.model.runner import ModelRunner

DEPTH, VOCABULARY = 4, 50


@functools.cache
def _model(architecture: str) -> PreTrainedModel:
    return shrunken(architecture)


class AnyRounds(RuleBasedStateMachine):
    """Prefills of ragged prompts, then rounds: drafts along any path, verification, and ragged commits."""

    architecture = "jamba"
    slack = 3

    @initialize(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=3), seed=st.integers(0, 1000))
    def prefill(self, lengths: list[int], seed: int) -> None:
        self.model = _model(self.architecture)
        self.noise = torch.Generator().manual_seed(seed)
        recurrent = recurrent_layers(self.model.config)
        self.cache = SharedCache(DEPTH, len(lengths), 120, self.slack, torch.device("cpu"), recurrent=recurrent)
        self.runner = ModelRunner(self.model, ADAPTERS[self.architecture], self.cache)
        self.full = LayerPath.full(DEPTH)
        self.rows: list[list[int]] = [[] for _ in lengths]
        if not max(lengths):
            return
        self.cache.reserve(max(lengths) + 1)
        prompts, start = self._tokens(max(lengths)), 0
        for width in self.cache.prefill_widths(lengths):
            counts = [min(max(length - start, 0), width) for length in lengths]
            with torch.no_grad():
                self.runner.prefill(prompts[:, start : start + width], counts)
            self.cache.commit(counts)
            start += width
        self.rows = [prompt[:length] for prompt, length in zip(prompts.tolist(), lengths, strict=True)]

    @rule(width=st.integers(1, slack + 1), moves=st.lists(st.integers(0, slack + 1), min_size=3, max_size=3))
    def plain_round(self, width: int, moves: list[int]) -> None:
        tokens = self._tokens(width)
        with torch.no_grad():
            self._check(tokens, self.runner.logits(self.full, tokens).logits)
        self._commit(tokens, moves)

    @rule(
        drafted=st.integers(1, slack),
        start=st.sampled_from(sublayers(DEPTH)[1:]),
        whole=st.booleans(),
        moves=st.lists(st.integers(0, slack + 1), min_size=3, max_size=3),
    )
    def round_with_a_draft(self, drafted: int, start: Sublayer, whole: bool, moves: list[int]) -> None:
        tokens = self._tokens(drafted + 1)
        path = LayerPath.up_to(DEPTH, start) if whole else LayerPath.without(DEPTH, [start])
        parts: list[ExactStates | None] = []
        with torch.no_grad():
            for column in range(drafted):
                parts.append(self.runner.logits(path, tokens[:, column : column + 1]).states)
                self.cache.advance(1)
            parts.append(self.runner.states(LayerPath.up_to(DEPTH, start), tokens[:, -1:]))
            self.cache.rollback(drafted)
            entering = ExactStates.concatenated([part for part in parts if part is not None])
            self._check(tokens, self.runner.logits(self.full.resumed_at(start), tokens, entering).logits)
        self._commit(tokens, moves)

    @invariant()
    def cursors_are_where_the_text_ends(self) -> None:
        if hasattr(self, "rows"):
            assert self.cache.lengths == tuple(map(len, self.rows))

    def _tokens(self, width: int) -> Tensor:
        self.cache.reserve(max(map(len, self.rows), default=0) + width)
        return torch.randint(3, VOCABULARY, (len(self.rows), width), generator=self.noise)

    def _check(self, tokens: Tensor, logits: Tensor) -> None:
        for row, new, found in zip(self.rows, tokens.tolist(), logits, strict=True):
            wanted = self.model(torch.tensor([row + new]), use_cache=False).logits[0, len(row) :]
            # These models compute their states in float32, whatever the model's dtype.
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)

    def _commit(self, tokens: Tensor, moves: list[int]) -> None:
        counts = [min(move, tokens.shape[1]) for move in moves[: len(self.rows)]]
        self.cache.commit(counts)
        self.rows = [row + new[:count] for row, new, count in zip(self.rows, tokens.tolist(), counts, strict=True)]


class AnyRoundsFalconH1(AnyRounds):
    architecture = "falcon_h1"


class AnyRoundsLfm2(AnyRounds):
    architecture = "lfm2"


class AnyRoundsQwen3Next(AnyRounds):
    architecture = "qwen3_next"


def _few(examples: int) -> settings:
    return settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=examples,
        stateful_step_count=8,
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if phase is not Phase.explain],
    )


AnyRounds.TestCase.settings = _few(10)
AnyRoundsLfm2.TestCase.settings = _few(10)
# The torch code of these is slow.
AnyRoundsFalconH1.TestCase.settings = _few(2)
AnyRoundsQwen3Next.TestCase.settings = _few(6)

TestAnyRounds = AnyRounds.TestCase
TestAnyRoundsFalconH1 = AnyRoundsFalconH1.TestCase
TestAnyRoundsLfm2 = AnyRoundsLfm2.TestCase
TestAnyRoundsQwen3Next = pytest.mark.slow(AnyRoundsQwen3Next.TestCase)


def test_an_mlp_that_is_not_there_cannot_be_skipped() -> None:
    with pytest.raises(selfspec.DraftConfigError, match=r"mlp=\[1\].*no MLP"):
        selfspec.wrap(_model("mamba2"), selfspec.LayerSkip(attention=[0], mlp=[1]), draft_length=4)
    selfspec.wrap(_model("mamba2"), selfspec.LayerSkip(layers=[1]), draft_length=4)
