"""Decoding over trees by hand, with runner and cache alone: greedy verification gives the tokens of plain decoding."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers import tiny
from helpers.any_rounds import FIRST_WORD
from helpers.shrunken import shrunken
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache, recurrent_layers
from selfspec.cache.tree import Tree
from selfspec.errors import UnsupportedModelError
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner

FULL = LayerPath.full(tiny.DEPTH)
EXIT = Sublayer(2, Part.ATTENTION)
TREE = Tree((-1, -1, 1, 1, 3, 0))
# The children of each node of the first two levels, all of them leaves of the last.
WIDE = Tree((-1, -1, 0, 0, 1, 1))
PROMPTS, NEW = (3, 9, 5), 16


class Decoding:
    """A ragged batch, what plain decoding makes of each row, and what rounds over trees have committed so far."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.adapter = ADAPTERS[model.config.model_type]
        prompts = [tiny.prompt(length, seed=length).clamp(min=FIRST_WORD) for length in PROMPTS]
        options = {"max_new_tokens": NEW + 8, "do_sample": False, "pad_token_id": 0}
        self.wanted: list[list[int]] = [model.generate(prompt, **options)[0].tolist() for prompt in prompts]
        recurrent = recurrent_layers(model.config) if self.adapter.recurrent else {}
        self.cache = SharedCache(tiny.DEPTH, len(PROMPTS), 64, len(TREE), torch.device("cpu"), recurrent=recurrent)
        self.runner = ModelRunner(model, self.adapter, self.cache)
        self.rows: list[list[int]] = [prompt[0].tolist() for prompt in prompts]
        unread = [length - 1 for length in PROMPTS]
        padded = torch.zeros(len(PROMPTS), max(unread), dtype=torch.long)
        for row, count in enumerate(unread):
            padded[row, :count] = prompts[row][0, :count]
        start = 0
        for width in self.cache.prefill_widths(unread):
            counts = [min(max(count - start, 0), width) for count in unread]
            self.runner.prefill(padded[:, start : start + width], counts)
            self.cache.commit(counts)
            start += width

    @property
    def last(self) -> Tensor:
        """The last committed token of each row."""
        return torch.tensor([row[-1:] for row in self.rows])

    def commit(self, tree: Tree, drafted: Tensor, logits: Tensor) -> list[tuple[int, ...]]:
        """Follow the target's best tokens from the last committed token on, as long as a child has them."""
        best = logits.argmax(-1).tolist()
        paths = []
        for row, tokens in enumerate(drafted.tolist()):
            path = [-1]
            while True:
                token = best[row][path[-1] + 1]
                child = next((node for node in tree.children[path[-1] + 1] if tokens[node] == token), None)
                self.rows[row].append(token)
                if child is None:
                    break
                path.append(child)
            paths.append(tuple(path))
        self.cache.commit_paths(paths)
        return paths


@pytest.fixture(params=[*sorted(tiny.BUILDERS), "gemma2", "gemma3n_text", "llama4_text", "jamba", "lfm2", "mamba2"])
def decoding(request: pytest.FixtureRequest) -> Decoding:
    name = request.param
    return Decoding(tiny.BUILDERS[name]() if name in tiny.BUILDERS else shrunken(name))


@torch.no_grad()
def test_greedy_verification_of_a_tree_gives_the_tokens_of_plain_decoding(decoding: Decoding) -> None:
    choice, noise = random.Random(0), torch.Generator().manual_seed(0)
    gathered = 0
    while min(map(len, decoding.rows)) < min(PROMPTS) + NEW:
        drafted = torch.randint(FIRST_WORD, tiny.VOCABULARY, (len(PROMPTS), len(TREE)), generator=noise)
        right: list[int] = []
        for row, text in enumerate(decoding.rows):
            # Of each row, the path to some node holds the right tokens, as far as these are known.
            path = choice.choice(TREE.paths)[: max(len(decoding.wanted[row]) - len(text), 0)]
            right.append(len(path))
            for depth, node in enumerate(path):
                token = decoding.wanted[row][len(text) + depth]
                siblings = TREE.children[TREE.parents[node] + 1]
                drafted[row, siblings] = FIRST_WORD if token > FIRST_WORD else FIRST_WORD + 1
                drafted[row, node] = token
        decoding.cache.reserve(max(map(len, decoding.rows)))
        decoding.cache.open(TREE)
        logits = decoding.runner.run(PassRequest(FULL, torch.cat([decoding.last, drafted], 1))).logits
        paths = decoding.commit(TREE, drafted, logits)
        assert all(len(path) > known for path, known in zip(paths, right, strict=True))
        gathered += sum(path != tuple(range(-1, len(path) - 1)) for path in paths)
    assert gathered > len(PROMPTS)
    for found, wanted in zip(decoding.rows, decoding.wanted, strict=True):
        assert found[: len(wanted)] == wanted[: len(found)]


@torch.no_grad()
def test_a_tree_that_an_early_exit_drafts_level_by_level_is_verified_from_its_states(decoding: Decoding) -> None:
    path, accepted = LayerPath.up_to(tiny.DEPTH, EXIT), 0
    while min(map(len, decoding.rows)) < min(PROMPTS) + NEW:
        decoding.cache.reserve(max(map(len, decoding.rows)))
        decoding.cache.open(WIDE)
        level, levels, states, first = decoding.last, [decoding.last], [], -1
        for _ in range(WIDE.depth):
            step = decoding.runner.run(PassRequest(path, level, first=first))
            states.append(step.states)
            first += level.shape[1]
            # Two children of each node, side by side.
            level = step.logits.topk(2).indices.flatten(1)
            levels.append(level)
        states.append(decoding.runner.states(PassRequest(path, level, first=first)))
        block = torch.cat(levels, 1)
        entering = ExactStates.concatenated([each for each in states if each is not None])
        logits = decoding.runner.run(PassRequest(FULL.resumed_at(EXIT), block, entering)).logits
        accepted += sum(len(nodes) - 1 for nodes in decoding.commit(WIDE, block[:, 1:], logits))
    assert accepted
    for found, wanted in zip(decoding.rows, decoding.wanted, strict=True):
        assert found[: len(wanted)] == wanted[: len(found)]


@pytest.mark.parametrize("architecture", ["bloom", "gpt_neo", "roformer"])
def test_a_model_that_reads_chains_alone_is_refused_a_tree(architecture: str) -> None:
    model, adapter = shrunken(architecture), ADAPTERS[architecture]
    cache = SharedCache(tiny.DEPTH, 1, 64, len(TREE), torch.device("cpu"))
    runner = ModelRunner(model, adapter, cache)
    cache.open(TREE)
    with pytest.raises(UnsupportedModelError, match=r"cannot read a tree of drafts.*draft a chain"), torch.no_grad():
        runner.run(PassRequest(FULL, tiny.prompt(len(TREE) + 1)))
    cache.open(Tree.chain(3))
    with torch.no_grad():
        runner.run(PassRequest(FULL, tiny.prompt(4).clamp(min=FIRST_WORD)))
