"""Trees that the model drafts level by level: their numbers, draws and noise, and the text that they leave exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import selfspec
from helpers import tiny
from helpers.drafting import GREEDY, Altered, Propose, stock
from helpers.exact import trees
from helpers.shrunken import shrunken
from selfspec.cache.tree import Tree
from selfspec.control.controller import Control, Controller
from selfspec.control.costs import Costs, CostsByRows
from selfspec.draft import Budget, Draft, EarlyExit
from selfspec.draft.tree_growth import (
    Confidences,
    RankChances,
    best_shape,
    by_level,
    growth_of,
    largest_products,
    upper_levels,
)

# A leaf before a node with children, a place with three, and a path that goes on alone.
UNEVEN = Tree((-1, -1, 1, 1, 1, 3, 5))
STAR = Tree((-1, -1, -1))


@dataclass
class Given(Control, Controller):
    """Drafts of one shape, whole or of its first level alone."""

    tree: Tree
    whole: bool = True

    def __post_init__(self) -> None:
        Controller.__init__(self, Budget(self.tree.depth, len(self.tree)))

    def begin(self, costs: CostsByRows) -> Controller:
        return self

    def budget(self, remaining: int, unfinished: Any) -> Budget:
        return self.most if remaining > self.most.depth else Budget(0, 0)

    def shape(self, chances: tuple[float, ...], budget: Budget) -> Tree:
        return self.tree

    def goes_on(self, confidences: Callable[[], list[float]]) -> bool:
        return self.whole


def _isomorphic(one: Tree, other: Tree) -> bool:
    def form(tree: Tree, node: int) -> Any:
        return sorted(form(tree, child) for child in tree.children[node + 1])

    return bool(form(one, -1) == form(other, -1))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(trees(12))
def test_nodes_with_children_come_first_level_by_level_and_every_node_has_one_draw(tree: Tree) -> None:
    found = by_level(tree)
    assert _isomorphic(found, tree)
    inner = [node for node in range(len(tree)) if found.children[node + 1]]
    assert inner == list(range(len(inner)))
    assert [found.depths[node] for node in inner] == sorted(found.depths[node] for node in inner)
    growth = growth_of(found, torch.device("cpu"))
    order = range(len(tree)) if growth.draws is None else growth.draws.tolist()
    assert sorted(order) == list(range(len(tree)))
    assert sum(sum(level.families) for level in growth.levels) == len(tree)
    for depth, level in enumerate(growth.levels, 1):
        above = upper_levels(found, depth)
        # What was read is what it was, and so is what was drawn for it.
        assert above.parents[: level.first + len(level.paths)] == found.parents[: level.first + len(level.paths)]
        assert len(above) == sum(each <= depth for each in found.depths)


class Watched(Altered):
    def __init__(self, layer: int) -> None:
        drafts: list[Draft] = []

        def keeping(propose: Propose, batch: Any, budget: Budget) -> Draft:
            drafts.append(propose(batch, budget))
            return drafts[-1]

        super().__init__(EarlyExit(layer), keeping)
        object.__setattr__(self, "drafts", drafts)

    drafts: list[Draft]


@pytest.fixture
def watched() -> Watched:
    return Watched(2)


def _options(**others: Any) -> dict[str, Any]:
    return {"max_new_tokens": 16, "do_sample": True, "top_k": None, "eos_token_id": None, "seed": 5, **others}


def test_siblings_are_drawn_without_replacement_from_what_they_are_scored_with(watched: Watched) -> None:
    spec = selfspec.wrap(tiny.llama(), watched, draft_length=Given(UNEVEN))
    spec.generate(tiny.prompt(9, 4), **_options())
    draft: Any = next(draft for draft in watched.drafts if len(draft.tree))
    assert draft.tree == by_level(UNEVEN)
    assert draft.steps == 4
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(4, len(UNEVEN)))
    for children in draft.tree.children:
        left = None
        for node in children:
            if left is not None:
                torch.testing.assert_close(draft.probs[:, node], left / left.sum(-1, keepdim=True))
            token = draft.tokens[:, node, None]
            assert (draft.probs[:, node].gather(-1, token) > 0).all()
            left = draft.probs[:, node].scatter(-1, token, 0.0)


def test_greedy_siblings_are_the_likeliest_tokens(watched: Watched) -> None:
    model, ids = tiny.llama(), tiny.prompt(9)
    spec = selfspec.wrap(model, watched, draft_length=Given(Tree((-1, -1, -1, 0, 0))))
    spec.generate(ids, max_new_tokens=8, **GREEDY)
    draft = watched.drafts[0]
    assert draft.probs is None
    model.model.layers = model.model.layers[:2]
    root, after = (model(torch.cat([ids, more], 1)).logits[0, -1] for more in (ids[:, :0], draft.tokens[:, :1]))
    # The first child has the children; it comes first, the leaves after it.
    assert draft.tokens[0].tolist() == [*root.topk(3).indices.tolist(), *after.topk(2).indices.tolist()]


def test_coupled_text_does_not_depend_on_the_tree_and_a_sibling_is_the_next_choice_of_the_noise(
    watched: Watched,
) -> None:
    model, ids = tiny.llama(), tiny.prompt(9, 3)
    options = _options(accept="coupled", temperature=0.8)
    plain = selfspec.wrap(model).generate(ids, **options)
    accepted = []
    for tree in (Tree.chain(1), Tree((-1,) * 4)):
        output = selfspec.wrap(model, watched, draft_length=Given(tree)).generate(ids, **options)
        assert torch.equal(output.sequences, plain.sequences)
        accepted.append(output.stats.accepted / output.stats.rounds)
    assert accepted[1] > accepted[0]
    siblings = watched.drafts[-1].tokens.sort().values
    assert (siblings.diff(dim=1) > 0).all()


def test_where_q_has_fewer_tokens_than_siblings_the_text_is_exact_all_the_same(watched: Watched) -> None:
    model, ids = tiny.llama(), tiny.prompt(9, 2)
    spec = selfspec.wrap(model, watched, draft_length=Given(STAR))
    output = spec.generate(ids, **_options(top_k=1))
    expected = stock(model, ids, 16)
    assert torch.equal(output.sequences, expected)
    probs: Any = watched.drafts[0].probs
    torch.testing.assert_close(probs[:, 1:], torch.full_like(probs[:, 1:], 1 / tiny.VOCABULARY))


class Sums(LogitsProcessor):
    """The text alone says what comes next; notes how long the prefixes are."""

    stateless = True

    def __init__(self) -> None:
        self.lengths: set[int] = set()

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.lengths.add(ids.shape[1])
        return scores + 1e4 * torch.nn.functional.one_hot(ids.sum(-1) % scores.shape[-1], scores.shape[-1])


def test_processors_see_the_path_to_each_node(watched: Watched) -> None:
    model, ids, sums = tiny.llama(), tiny.prompt(9, 2), Sums()
    options: dict[str, Any] = {"max_new_tokens": 20, "logits_processor": LogitsProcessorList([sums]), **GREEDY}
    expected = model.generate(ids, **options)
    spec = selfspec.wrap(model, watched, draft_length=Given(UNEVEN))
    output = spec.generate(ids, **options)
    assert torch.equal(output.sequences, expected)
    # Draft and target choose alike all the way down.
    assert output.stats.mean_accepted_length > UNEVEN.depth
    sums.lengths.clear()
    next(spec.stream(ids[:1], **options))
    assert max(sums.lengths) == 9 + UNEVEN.depth


def test_a_tree_ends_at_the_level_that_the_control_says(watched: Watched) -> None:
    spec = selfspec.wrap(tiny.llama(), watched, draft_length=Given(UNEVEN, whole=False))
    ids = tiny.prompt(9, 2)
    output = spec.generate(ids, max_new_tokens=12, **GREEDY)
    assert torch.equal(output.sequences, stock(spec.model, ids, 12))
    assert watched.drafts[0].tree == Tree((-1, -1))
    assert watched.drafts[0].steps == 1


def test_scores_that_are_not_finite_count_as_no_confidence() -> None:
    scores = torch.tensor([[[0.0, 2.0]], [[0.0, torch.nan]], [[-torch.inf, -torch.inf]]])
    assert Confidences.of(scores)() == pytest.approx([1 / (1 + torch.tensor(-2.0).exp().item()), 0.0, 0.0])


def test_a_model_that_reads_chains_alone_is_refused_before_any_pass() -> None:
    spec = selfspec.wrap(shrunken("gpt_neo"), "exit:2", draft_length=selfspec.FixedLength(2, nodes=5))
    with pytest.raises(selfspec.errors.UnsupportedModelError, match=r"cannot read a tree of drafts.*draft a chain"):
        spec.stream(tiny.prompt(5), max_new_tokens=8)


@pytest.mark.parametrize(("widening", "branches"), [(0.0, True), (0.9, False)])
def test_the_default_control_drafts_trees_where_their_nodes_are_cheap(
    watched: Watched, widening: float, branches: bool
) -> None:
    control = selfspec.CostAware(4, Costs(draft=0.3, widening=widening), nodes=11)
    spec, ids = selfspec.wrap(tiny.llama(), watched, draft_length=control), tiny.prompt(9)
    options: dict[str, Any] = {"max_new_tokens": 24, **GREEDY}
    output = spec.generate(ids, **options)
    assert torch.equal(output.sequences, spec.model.generate(ids, **options))
    assert any(not draft.tree.is_chain for draft in watched.drafts) == branches
    assert any(len(draft.tree) for draft in watched.drafts) or not branches


def test_ranks_are_counted_along_the_path() -> None:
    chances, tree = RankChances((0.45, 0.12), 30.0), Tree((-1, -1, 0, 1))
    assert chances.rates() == (0.44, 0.12)
    for _ in range(400):
        chances.count(tree, (1, 3))
    # The second child of the root, and then the first one of it.
    assert chances.rates() == (0.5, 0.5)


def expected(tree: Tree, chances: tuple[float, ...]) -> float:
    """Draft tokens committed: each node counts if all ranks along its path are accepted."""
    total = 0.0
    for path in tree.paths:
        product = 1.0
        for node in path:
            product *= chances[tree.ranks[node]]
        total += product
    return total


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 5))
def test_no_tree_of_so_many_nodes_commits_more(weights: list[float], nodes: int, depth: int) -> None:
    chances = tuple(sorted((weight / (sum(weights) + 0.1) for weight in weights), reverse=True))
    found = largest_products(chances, nodes, depth)
    assert found.expected == pytest.approx(expected(found.tree, chances))
    best = 0.0
    for parents in itertools.product(*(range(-1, node) for node in range(nodes))):
        tree = Tree(parents)
        if tree.depth <= depth and max(map(len, tree.children)) <= len(chances):
            best = max(best, expected(tree, chances))
    # Where there is no room for so many nodes no tree is found here.
    assert found.expected >= best - 1e-12
    assert found.tree.depth <= depth
    assert len(found.tree) == nodes or best == 0


def test_the_tree_grows_as_far_as_its_cost_is_worth_it() -> None:
    def size(each: float) -> int:
        return len(best_shape((0.5, 0.2, 0.1), lambda nodes: 1.1 + each * nodes, Budget(8, 31)).tree)

    sizes = [size(each) for each in (1.0, 0.1, 0.02, 0.0)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 0
    assert sizes[-1] == 31
