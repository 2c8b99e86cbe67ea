"""Exits chosen as the text goes: by accepted tokens alone, the exit that promises most, and never another text."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import GREEDY
from helpers.reference import Bench
from selfspec.adapters import ADAPTERS
from selfspec.cache.tree import Tree
from selfspec.control import FixedLength
from selfspec.control.controller import Controller
from selfspec.control.costs import Costs
from selfspec.draft import Budget, Draft, EarlyExit, RowVerdict, Verdict
from selfspec.draft.exit_choice import ChosenExit, ChosenExitProposer, ExitTrial
from selfspec.model.layer_path import LayerPath
from selfspec.runtime.request import PassRequest, PassResult


def test_layers_that_add_nothing_are_left_out() -> None:
    # Near enough to no change for a first draft to be accepted now and then.
    model = tiny.llama(initializer_range=0.1, vocab_size=6)
    for layer in (1, 2, 3):
        model.model.layers[layer].self_attn.o_proj.weight.data.zero_()
        model.model.layers[layer].mlp.down_proj.weight.data.zero_()
    spec = selfspec.wrap(model, ChosenExit(1, 3), draft_length=FixedLength(3))
    rounds = [chunk.rows[0] for chunk in spec.stream(tiny.prompt(9) % 6, max_new_tokens=96, **GREEDY)]
    assert all(row.accepted == len(row.draft) for row in rounds[len(rounds) // 2 :])


def verdict(paths: Sequence[list[int] | None]) -> Verdict:
    """Which nodes each row has accepted; None: it has ended before."""
    rows = {
        number: RowVerdict([1, 2], path, len(path) + 1, [1], 0, False, True, ())
        for number, path in enumerate(paths)
        if path is not None
    }
    return Verdict(range(len(paths)), rows, torch.ones(len(paths), 1))


def learnt(
    model: PreTrainedModel, draft: ChosenExit, chances: Tensor, paths: Sequence[list[int] | None]
) -> ChosenExitProposer:
    """Return the proposer after trials that all said the same."""
    rows: Any = SimpleNamespace(
        runner=SimpleNamespace(depth=tiny.DEPTH, model=model),
        running=list(range(len(paths))),
        controller=Controller(Budget.chain(2), costs=Costs(0.5)),
    )
    proposer = draft.begin(rows)
    tokens = torch.ones(len(paths), 2, dtype=torch.long)
    for _ in range(6):
        proposed = Draft(tokens, Tree.chain(2), steps=2, behind=ExitTrial(2, True, (2, 1, 3)))
        proposer.learn(rows, proposed, PassResult(tokens, behind=chances), verdict(paths))
    return proposer


@pytest.mark.parametrize(
    ("said", "paths", "chosen"),
    [
        ([["good", "bad"]], [[]], 3),
        ([["bad", "good"]], [[]], 1),
        ([["bad", "bad"], ["good", "bad"]], [None, []], 3),
        ([["good", "bad"], ["bad", "bad"]], [[], None], 3),
    ],
)
def test_rejected_tokens_and_rows_that_ended_count_for_nothing(
    llama: PreTrainedModel, said: list[list[str]], paths: list[list[int] | None], chosen: int
) -> None:
    # Of the network, and exits at 2, 1 and 3.
    chances = {"good": [1.0, 0.2, 0.1, 0.95], "bad": [1.0, 0.2, 1.0, 0.1]}
    found = learnt(llama, ChosenExit(1, 3), torch.tensor([[chances[each] for each in row] for row in said]), paths)
    assert found.chosen == EarlyExit(chosen)


PAST, BLOCK, TOKENS, ROWS = 5, 4, 2, 2
TREE = Tree.chain(BLOCK - 1)
EXACT = 1e-9


def bench(model: PreTrainedModel) -> Bench:
    adapter = ADAPTERS[model.config.model_type]
    cache = adapter.shared_cache(model, ROWS, limit=PAST + BLOCK, slack=40, device=torch.device("cpu"))
    return Bench(model, adapter, cache, tiny.prompt(PAST + BLOCK, ROWS), PAST)


def after(model: PreTrainedModel, path: LayerPath, node: int) -> Tensor:
    """Probabilities by a pass along a path over one node, where all before it were read by the whole network."""
    alone = bench(model)
    if node >= 0:
        alone.runner.run(PassRequest(alone.full, alone.block[:, : node + 1]))
    return alone.runner.run(PassRequest(path, alone.block[:, node + 1 : node + 2], first=node)).logits.softmax(-1)


def tried(model: PreTrainedModel, trial: ExitTrial) -> Tensor:
    found = bench(model)
    result = found.runner.run(PassRequest(found.full, found.block, tree=TREE, behind=trial))
    assert found.cache.cursors.tree == TREE
    assert isinstance(result.behind, Tensor)
    return result.behind


@torch.no_grad()
def test_exits_are_read_off_the_pass(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    chances = tried(model, ExitTrial(TOKENS, False, (3, 1)))
    for token in range(TOKENS):
        target = after(model, LayerPath.full(tiny.DEPTH), token - 1)
        for column, path in enumerate((LayerPath.full(tiny.DEPTH), EarlyExit(3).path(4), EarlyExit(1).path(4))):
            expected = torch.minimum(target, after(model, path, token - 1)).sum(-1)[:, 0]
            assert torch.allclose(chances[:, token, column].double(), expected, atol=1e-5)


@torch.no_grad()
def test_the_rest_of_the_pass_is_as_ever(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    plain = bench(model)
    plain.cache.open(TREE)
    expected = plain.runner.run(PassRequest(plain.full, plain.block, taps=(1, "last", "normed")))
    found, trial = bench(model), ExitTrial(TOKENS, False, (3, 1))
    result = found.runner.run(PassRequest(found.full, found.block, taps=(1, "last", "normed"), tree=TREE, behind=trial))
    left = [expected.logits, dict(expected.features), plain.keys_and_values()]
    same = [result.logits, dict(result.features), found.keys_and_values()]
    torch.testing.assert_close(same, left, atol=EXACT, rtol=0)


@torch.no_grad()
def test_greedy_decoding_asks_for_the_best_token(llama: PreTrainedModel) -> None:
    chances = tried(llama, ExitTrial(TOKENS, True, (3, 1)))
    for token in range(TOKENS):
        target = after(llama, LayerPath.full(tiny.DEPTH), token - 1).argmax(-1)
        agrees = [target == after(llama, EarlyExit(layer).path(4), token - 1).argmax(-1) for layer in (3, 1)]
        assert chances[:, token].bool().tolist() == torch.cat([target == target, *agrees], 1).tolist()
