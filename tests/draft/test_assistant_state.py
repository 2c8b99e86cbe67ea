"""A state machine over an assistant's cache: whatever rows commit, it reads the text and the draft after it alike."""

from __future__ import annotations

from typing import ClassVar, cast

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor
from transformers import PreTrainedModel

from helpers import tiny
from helpers.any_rounds import (
    FIRST_WORD,
    NODES,
    a_number_for_each_row,
    alone,
    any_rounds,
    shrunken_model,
    tiny_model,
    trees,
)
from helpers.joints import padded
from selfspec.adapters import ADAPTERS
from selfspec.cache.tree import Tree
from selfspec.decode.sequences import Sequences
from selfspec.draft.assistant import AssistantState
from selfspec.draft.rows_view import RowsView
from selfspec.draft.tree_growth import by_level, growth_of
from selfspec.runtime.runner import ModelRunner

_LIMIT, _ROWS = 90, 3


class _View:
    """What the state reads of a batch's rows."""

    def __init__(self, sequences: Sequences) -> None:
        self.running, self.text, self.text_length = sequences.running, sequences.text_from, sequences.text_length


class AnyCommits(RuleBasedStateMachine):
    """Rounds that draft or do not, and commit any number of tokens in each row; rows that end, and are dropped."""

    architecture = "llama"
    bucket = 1
    branches = True
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
        cache = adapter.shared_cache(self.model, len(lengths), _LIMIT, NODES, bucket=self.bucket)
        self.state = AssistantState(
            ModelRunner(self.model, adapter, cache), cache, self.sequences.running, tiny.VOCABULARY, weights=0
        )

    @rule(tree=trees(least=1), ends=a_number_for_each_row(-2, NODES - 1), own=st.integers(1, 3))
    def drafted(self, tree: Tree, ends: list[int], own: int) -> None:
        """The assistant drafts; each row commits a path of that, and tokens besides, or nothing."""
        tree = by_level(tree) if self.branches else Tree.chain(len(tree))
        rows, texts = list(self.sequences.running), self._texts()
        drafts = self._random(len(rows), len(tree))
        levels = growth_of(tree, drafts.device).levels
        with torch.no_grad():
            self._check(self.state.after_text(cast(RowsView, _View(self.sequences)), tree)[:, 0], texts)
            for level in levels[1:]:
                nodes = range(level.first, level.first + len(level.paths))
                logits = self.state.after(drafts[:, nodes.start : nodes.stop], level.first)
                for node, found in zip(nodes, logits.unbind(1), strict=True):
                    paths = [run[list(tree.paths[node])].tolist() for run in drafts]
                    self._check(found, [text + path for text, path in zip(texts, paths, strict=True)])
        for row, run, end in zip(rows, drafts, ends, strict=False):
            if row in self.sequences.unfinished and end > -2:
                path = tree.paths[min(end, len(tree) - 1)] if end >= 0 else ()
                kept = run[list(path)].tolist()[: self._room_of(row)]
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
                torch.testing.assert_close(found, alone(self.model, text, 1)[0], rtol=0, atol=self.tolerance)


class Shrunken(AnyCommits):
    architecture = "bloom"
    branches = False
    tolerance = 1e-4

    def built(self) -> PreTrainedModel:
        return shrunken_model(self.architecture, "eager")


TestAnyCommits = any_rounds(AnyCommits, 8)
TestMistral = any_rounds(AnyCommits, 8, architecture="mistral")
TestGPT2 = any_rounds(AnyCommits, 8, architecture="gpt2")
TestInBuckets = any_rounds(AnyCommits, 8, bucket=16)
TestPadding = any_rounds(Shrunken, 2)
TestRecurrent = any_rounds(Shrunken, 2, architecture="mamba", branches=True)
TestHybrid = pytest.mark.contract(any_rounds(Shrunken, 2, architecture="qwen3_next"))
