"""Recorded passes over trees: one recording for all trees of a size, and none but the old ones for a chain."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers import tiny
from helpers.any_rounds import AnyRounds, any_rounds
from helpers.captures import StandIn
from helpers.proving import ticking
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.tree import Tree
from selfspec.model.layer_path import LayerPath
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.recorded import runner_for
from selfspec.runtime.request import PassRequest

PROMPT, NODES, BUCKET = 9, 4, 8
FULL = LayerPath.full(tiny.DEPTH)
TREES = [Tree((-1, -1, 0, 0)), Tree((-1, 0, 0, 2)), Tree((-1, -1, -1, 1)), Tree((-1, -1, 0, 1))]


class Generation:
    """Rounds over a cache, by programs or without them."""

    def __init__(self, model: PreTrainedModel, graphs: GraphCache | None, bucket: int) -> None:
        self.cache = SharedCache(tiny.DEPTH, 1, 64, NODES, torch.device("cpu"), bucket=bucket)
        self.runner = runner_for(model, ADAPTERS[model.config.model_type], self.cache, graphs)
        self.cache.cursors.reserve(PROMPT + 1)
        self.runner.prefill(tiny.prompt(PROMPT), [PROMPT])
        self.cache.commit([PROMPT])

    def round(self, tree: Tree, seed: int) -> Tensor:
        """Logits of all nodes; the path to the last one is committed."""
        self.cache.cursors.reserve(max(self.cache.seq_lens) + 1)
        self.cache.open(tree)
        logits = self.runner.run(PassRequest(FULL, tiny.prompt(len(tree) + 1, seed=seed))).logits
        self.cache.commit_paths([(-1, *tree.paths[-1])])
        return logits


@torch.no_grad()
def test_one_recording_serves_for_all_trees_of_a_size(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    graphs = GraphCache(StandIn(0, BUCKET), ticking())
    recorded, stock = (Generation(model, each, graphs.bucket) for each in (graphs, None))
    for seed in range(16):
        tree = TREES[seed % len(TREES)]
        assert torch.equal(recorded.round(tree, seed), stock.round(tree, seed)), f"{tree} in round {seed}"
    (kind,) = graphs.proved
    assert kind.nodes == NODES
    assert not graphs.refusals


@torch.no_grad()
def test_an_open_chain_runs_what_runs_where_nothing_is_opened(llama: PreTrainedModel) -> None:
    graphs = GraphCache(StandIn(0, BUCKET), ticking())
    generation = Generation(llama, graphs, BUCKET)
    for seed in range(6):
        generation.round(Tree.chain(NODES), seed)
        generation.runner.run(PassRequest(FULL, tiny.prompt(NODES + 1)))
    (kind,) = graphs.proved
    assert kind.nodes is None


class ByGraph(AnyRounds):
    """Windows too."""

    architecture = "mistral"
    kernels = ("sdpa",)
    bucket = BUCKET

    def graphs(self, model: PreTrainedModel) -> GraphCache:
        return _graphs_of(model)


@functools.cache
def _graphs_of(model: PreTrainedModel) -> GraphCache:
    """Programs that all examples share."""
    return GraphCache(StandIn(0, BUCKET), ticking())


TestAnyRoundsByGraph = pytest.mark.contract(any_rounds(ByGraph, 6))
