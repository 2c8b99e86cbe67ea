"""A state machine over an assistant's cache: whatever rows commit, it reads the text and the draft after it alike."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor
from transformers import PreTrainedModel

from helpers import tiny
from helpers.any_rounds import FIRST_WORD, a_number_for_each_row, alone, any_rounds, shrunken_model, tiny_model
from helpers.joints import padded
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache
from selfspec.decode.sequences import Sequences
from selfspec.draft.assistant_state import AssistantState
from selfspec.runtime.runner import ModelRunner

_DEPTH, _LIMIT, _ROWS = 4, 90, 3


class AnyCommits(RuleBasedStateMachine):
    """Rounds that draft or do not, and commit any number of tokens in each row; rows that end, and are dropped."""

    architecture = "llama"
    bucket = 1
    tolerance: ClassVar[float] = 1e-9

    def built(self) -> PreTrainedModel:
        return tiny_model(self.architecture, "sdpa")

    @initialize(
        lengths=st.lists(st.integers(1, 9) | st.integers(55, 66), min_size=1, max_size=_ROWS), seed=st.integers(0, 99)
    )
    def begin(self, lengths: list[int], seed: int) -> None:
        self.noise = torch.Generator().manual_seed(seed)
        self.model, adapter = self.built(), ADAPTERS[self.architecture]
        self.prompts = [self._random(1, length) for length in lengths]
        ids, mask = padded(self.prompts)
        self.sequences = Sequences(ids, 0, mask.bool())
        cache = SharedCache.of_model(self.model, adapter, len(lengths), _LIMIT, _DEPTH, bucket=self.bucket)
        self.state = AssistantState(
            ModelRunner(self.model, adapter, cache), cache, self.sequences.running, tiny.VOCABULARY, weights=0
        )

    @rule(depth=st.integers(1, _DEPTH), accepted=a_number_for_each_row(-1, _DEPTH), own=st.integers(1, 3))
    def drafted(self, depth: int, accepted: list[int], own: int) -> None:
        """The assistant drafts; each row commits some of that, and a token besides, or nothing."""
        rows = list(self.sequences.running)
        texts, drafts = self._texts(), self._random(len(rows), depth).tolist()
        with torch.no_grad():
            self._check(self.state.after_text(self.sequences), texts)
            for place in range(depth - 1):
                token = torch.tensor([[draft[place]] for draft in drafts])
                read = [[*text, *draft[: place + 1]] for text, draft in zip(texts, drafts, strict=True)]
                self._check(self.state.after(token), read)
        for row, draft, count in zip(rows, drafts, accepted, strict=False):
            if row in self.sequences.unfinished and count >= 0:
                kept = draft[:count][: self._room_of(row)]
                # Lockstep may cut a row behind a draft token.
                extra = self._random(1, own - 1)[0].tolist()[: self._room_of(row) - len(kept)]
                self.sequences.committed[row] += kept + extra

    @rule(counts=a_number_for_each_row(0, 12))
    def committed(self, counts: list[int]) -> None:
        """Another source drafted."""
        for row, count in zip(sorted(self.sequences.unfinished), counts, strict=False):
            self.sequences.committed[row] += self._random(1, min(count, self._room_of(row)))[0].tolist()

    @precondition(lambda self: len(self.sequences.unfinished) > 1)
    @rule(ended=st.integers(0, _ROWS - 1), drop=st.booleans())
    def ended(self, ended: int, drop: bool) -> None:
        self.sequences.unfinished.discard(ended)
        if drop:
            self.sequences.running = [row for row in self.sequences.running if row in self.sequences.unfinished]

    def _room_of(self, row: int) -> int:
        return _LIMIT - self.sequences.text_length(row)

    def _random(self, rows: int, width: int) -> Tensor:
        return torch.randint(FIRST_WORD, tiny.VOCABULARY, (rows, width), generator=self.noise)

    def _texts(self) -> list[list[int]]:
        return [self.prompts[row][0].tolist() + self.sequences.committed[row] for row in self.sequences.running]

    def _check(self, logits: Tensor, texts: list[list[int]]) -> None:
        for text, found in zip(texts, logits, strict=True):
            # What lies past the limit is scrap.
            if len(text) <= _LIMIT:
                torch.testing.assert_close(found, alone(self.model, text, 1), rtol=0, atol=self.tolerance)


class Mistral(AnyCommits):
    architecture = "mistral"


class GPT2(AnyCommits):
    architecture = "gpt2"


class InBuckets(AnyCommits):
    bucket = 16


class Shrunken(AnyCommits):
    architecture = "bloom"
    tolerance = 1e-4

    def built(self) -> PreTrainedModel:
        return shrunken_model(self.architecture, "eager")


class Recurrent(Shrunken):
    architecture = "mamba"


class Hybrid(Shrunken):
    architecture = "qwen3_next"


for machine in (AnyCommits, Mistral, GPT2, InBuckets):
    machine.TestCase.settings = any_rounds(8)
for slower in (Shrunken, Recurrent, Hybrid):
    slower.TestCase.settings = any_rounds(2)

TestAnyCommits = AnyCommits.TestCase
TestMistral = Mistral.TestCase
TestGPT2 = GPT2.TestCase
TestInBuckets = InBuckets.TestCase
TestPadding = Shrunken.TestCase
TestRecurrent = Recurrent.TestCase
TestHybrid = pytest.mark.contract(Hybrid.TestCase)
