"""Trees: what follows from the parents of their nodes, and models that read none."""

from __future__ import annotations

import pytest
import torch

from helpers import tiny
from helpers.shrunken import shrunken
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.tree import Tree
from selfspec.errors import UnsupportedModelError
from selfspec.model.layer_path import LayerPath
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner

FORK = Tree((-1, -1, 0, 0, 1, 2))


def test_what_follows_from_parents() -> None:
    assert len(FORK) == 6
    assert FORK.depths == (1, 1, 2, 2, 2, 3)
    assert FORK.depth == 3
    assert FORK.paths == ((0,), (1,), (0, 2), (0, 3), (1, 4), (0, 2, 5))
    assert FORK.children == ((0, 1), (2, 3), (4,), (5,), (), (), ())
    assert not FORK.is_chain


@pytest.mark.parametrize("length", [0, 1, 4])
def test_a_chain_has_one_branch(length: int) -> None:
    chain = Tree.chain(length)
    assert chain.is_chain
    assert chain.depths == tuple(range(1, length + 1))
    assert chain.depth == length
    assert Tree.chain(length) is chain


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-2,), (-1, 2, 0)])
def test_a_node_comes_after_its_parent(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="parent"):
        Tree(parents)


def test_the_first_branch_after_a_path() -> None:
    tree = Tree((-1, -1, 0, 0, 2))
    assert [tree.first_branch(path) for path in ((), (0,), (0, 3), (1,))] == [[0, 2, 4], [2, 4], [], []]
    assert Tree.chain(3).first_branch((0,)) == [1, 2]


@pytest.mark.parametrize("architecture", ["bloom", "gpt_neo", "roformer"])
def test_a_model_that_reads_chains_alone_is_refused_a_tree(architecture: str) -> None:
    model, adapter = shrunken(architecture), ADAPTERS[architecture]
    cache = SharedCache(tiny.DEPTH, 1, 64, len(FORK), torch.device("cpu"))
    runner = ModelRunner(model, adapter, cache)
    cache.open(FORK)
    with pytest.raises(UnsupportedModelError, match=r"cannot read a tree of drafts.*draft a chain"), torch.no_grad():
        runner.run(PassRequest(LayerPath.full(tiny.DEPTH), tiny.prompt(len(FORK) + 1)))
    cache.open(Tree.chain(3))
    with torch.no_grad():
        runner.run(PassRequest(LayerPath.full(tiny.DEPTH), tiny.prompt(4).clamp(min=3)))
