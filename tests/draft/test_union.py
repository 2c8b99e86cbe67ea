"""Drafts of several sources: offers in one tree, beside what a model drew; cascades; rows with sources of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import GREEDY, ModelDrafts, Offering, Oracle, outcome
from helpers.exact import committed_in_step_of, conditionals
from selfspec.accept import Block, Rule, TokenLevel, find_rule
from selfspec.cache.tree import Tree
from selfspec.control import CostAware, FixedLength
from selfspec.control.costs import Costs
from selfspec.draft import (
    Budget,
    Cascade,
    Draft,
    Drafter,
    EarlyExit,
    FreeProposer,
    PromptLookup,
    Proposer,
    Recycling,
    RowsView,
    Stateless,
    Suffixes,
    Union,
)
from selfspec.draft.draft import Offer, TokenPath
from selfspec.draft.suffixes import counted
from selfspec.draft.union import Merged, MergingProposer, Outcome, Trust, UnionProposer, likeliest_path, merged


def test_what_was_seen_stands_beside_the_models_draft(llama: PreTrainedModel) -> None:
    ids = tiny.prompt(9)
    exit_alone = selfspec.wrap(llama, EarlyExit(1), draft_length=FixedLength(2)).generate(
        ids, max_new_tokens=32, **GREEDY
    )
    spec = selfspec.wrap(llama, Union(Suffixes(), EarlyExit(1)), draft_length=ModelDrafts(2, nodes=6))
    spec.generate(ids, max_new_tokens=32, **GREEDY)
    again = spec.generate(ids, max_new_tokens=32, **GREEDY)
    # The model's two, and the text as it was written the last time.
    assert again.stats.mean_accepted_length > exit_alone.stats.mean_accepted_length + 0.5
    first = next(spec.stream(ids, max_new_tokens=32, **GREEDY))
    assert len(first.rows[0].draft) > 2


@pytest.mark.parametrize("draft", ["union:suffix+int8", "union:recycle+exit:2"])
def test_more_siblings_than_the_model_would_draft_itself(llama: PreTrainedModel, draft: str) -> None:
    ids = tiny.prompt(20)
    spec = selfspec.wrap(llama, draft, draft_length=ModelDrafts(3, nodes=40))
    found = spec.generate(ids, max_new_tokens=100, **GREEDY).sequences
    assert torch.equal(found, llama.generate(ids, max_new_tokens=100, **GREEDY))


def test_tokens_off_the_models_chain_say_nothing_of_its_confidence() -> None:
    control: Any = CostAware(2, nodes=6).begin(Costs(0.3))
    control.budget(20, [True])
    for _ in range(2):
        control.goes_on(lambda: [0.98])
    before = control._acceptance.mean
    # Both accepted tokens lie beside the chain: its first token was rejected, the second never judged.
    draft = Draft(torch.zeros(1, 4, dtype=torch.long), Tree((-1, 0, -1, 2)), steps=2)
    control.learn(draft, [outcome(2, 2, 3, strayed=2)])
    assert control._acceptance.mean < before
    assert sum(control._acceptance._judged) == 1


def test_worth_of_sources_is_learnt_apart_beside_a_model(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[Any] = []
    begin = Union.begin

    def begun(union: Union, rows: RowsView) -> Proposer:
        states.append(begun := begin(union, rows))
        return begun

    monkeypatch.setattr(Union, "begin", begun)
    spec = selfspec.wrap(llama, Union(Suffixes(), Recycling(), EarlyExit(1)), draft_length=ModelDrafts(2, nodes=6))
    spec.generate(tiny.prompt(9), max_new_tokens=40, **GREEDY)
    (state,) = states
    promised = state._free.trust(0)._promised
    assert {key[0] for key in promised} == {"beside"}
    assert {key[1] for key in promised} == {0, 1}


class Drew(Proposer):
    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return self._draft


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", [TokenLevel(), Block()], ids=["token", "block"])
def test_rows_in_lockstep_are_cut_exactly(rule: Rule, seed: int) -> None:
    # Where the first row draws 0, 1 and so all that it is offered, there is room beside the second row's first token.
    free = Offering([{(0,): 0.98, (0, 1): 0.98}, {(1,): 0.4}])
    rows: Any = SimpleNamespace(
        running=[0, 1], unfinished={0, 1}, last_tokens=torch.zeros(2, 1, dtype=torch.long), text=lambda *_: [0],
        text_length=lambda _: 1, controller=ModelDrafts(2).begin(Costs(0.3)), rows_apart=False, chains_only=False,
        in_lockstep=True, runner=SimpleNamespace(vocabulary=3),
    )  # fmt: skip

    def proposed(drawn: Draft) -> Draft:
        return UnionProposer(MergingProposer(rows, [free]), Drew(drawn)).propose(rows, Budget(2, 3))

    generator = torch.Generator().manual_seed(seed)
    row, beside = ((conditionals(3, range(1, 4), generator), conditionals(3, range(1, 3), generator)) for _ in range(2))
    result = committed_in_step_of(rule, row, beside, proposed)
    torch.testing.assert_close(result.joint, row[0].joint(), atol=1e-12, rtol=0)


def _most(nodes: int, committed: float) -> float:
    return committed


def _paths(parents: tuple[int, ...], tokens: list[int | None]) -> list[tuple[int | None, ...]]:
    return [tuple(tokens[node] for node in path) for path in Tree(parents).paths]


def test_shares_count_what_was_never_seen() -> None:
    shares = counted([(2.0, [1, 2]), (1.0, [1, 3]), (1.0, [4])])
    assert shares == {(1,): 3 / 6, (1, 2): 2 / 5, (1, 3): 1 / 5, (4,): 1 / 6}


def test_the_likeliest_nodes_are_taken_and_siblings_are_in_their_order() -> None:
    reach = {(1,): 0.5, (1, 2): 0.4, (3,): 0.3, (1, 4): 0.05, (3, 5): 0.2}
    found = merged([reach], Budget(4, 5), _most, branches=True)
    assert _paths(found.parents, found.tokens[0]) == [(1,), (1, 2), (3,), (3, 5), (1, 4)]
    assert _paths(*_first(merged([reach], Budget(4, 3), _most, branches=True))) == [(1,), (1, 2), (3,)]
    assert _paths(*_first(merged([reach], Budget(1, 3), _most, branches=True))) == [(1,), (3,)]
    assert _paths(*_first(merged([reach], Budget(4, 5), _most, branches=False))) == [(1,), (1, 2)]


def _first(found: Merged) -> tuple[tuple[int, ...], list[int | None]]:
    return found.parents, found.tokens[0]


def test_a_tree_is_as_large_as_pays() -> None:
    reach: dict[TokenPath, float] = {(1,): 0.5, (2,): 0.3, (3,): 0.1}

    def promise(nodes: int, committed: float) -> float:
        return (1 + committed) / (1 + 0.25 * nodes)

    assert len(merged([reach], Budget(4, 7), promise, branches=True).parents) == 1
    assert merged([{(1,): 0.01}], Budget(4, 7), promise, branches=True).parents == ()
    assert merged([{}], Budget(4, 7), promise, branches=True).parents == ()


def test_rows_share_a_shape_and_have_tokens_of_their_own() -> None:
    rows: list[dict[TokenPath, float]] = [{(1,): 0.9, (1, 2): 0.8}, {(5,): 0.5, (6,): 0.4}]
    found = merged(rows, Budget(4, 3), _most, branches=True)
    assert found.parents == (-1, 0, -1)
    assert found.tokens == [[1, 2, None], [5, None, 6]]


def test_nodes_beside_a_draft_are_those_it_has_not() -> None:
    reach: dict[TokenPath, float] = {(7,): 0.6, (7, 8): 0.5, (7, 9): 0.2, (7, 9, 3): 0.1, (4,): 0.3}
    drawn: dict[TokenPath, int] = {(7,): 0, (7, 8): 1}
    found = merged([reach], Budget(4, 3), _most, branches=True, under=[drawn])
    # Numbered behind the two that are drawn: a sibling of the first, one of the second, and what follows that.
    assert found.parents == (-1, 0, 3)
    assert found.tokens == [[4, 9, 3]]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=8), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 8),
    st.booleans(),
)
def test_every_node_comes_after_its_parent_and_is_one_that_was_offered(
    rows: list[list[list[int]]], depth: int, more: int, branches: bool
) -> None:
    trust = Trust()
    offered = [trust.reach([Offer(1, counted((1.0, each) for each in row))]) for row in rows]
    found = merged(offered, Budget(depth, depth + more), _most, branches)
    tree = Tree(found.parents)
    assert tree.depth <= depth
    assert len(tree) <= depth + more
    assert branches or tree.is_chain
    for reach, tokens in zip(offered, found.tokens, strict=True):
        chosen = [path for path in _paths(found.parents, tokens) if None not in path]
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= reach.keys()


def test_trust_follows_what_is_accepted_by_source_kind_and_place() -> None:
    trust, offers = Trust(), [Offer(3, {(1,): 0.5, (1, 2): 0.5}), Offer(1, {(4,): 0.25})]
    tree, tokens = Tree((-1, 0, -1)), [1, 2, 4]
    assert trust.reach(offers) == {(1,): 0.5, (1, 2): 0.25, (4,): 0.25}
    for _ in range(20):
        trust.count(offers, Outcome(tree, tokens, [0, 1]))
    reach = trust.reach(offers)
    # Both levels were accepted, of 0.5 each: twice as often as promised, but for what was held at first. Never 4.
    assert reach[(1,)] == pytest.approx(0.5 * 44 / 24)
    assert reach[(4,)] == pytest.approx(0.25 * 4 / 9)
    assert trust.reach([Offer(2, {(1,): 0.5})]) == {(1,): 0.5}
    assert trust.reach(offers, "elsewhere")[(1,)] == 0.5


def test_nodes_of_a_model_say_nothing_of_the_sources_beside_it() -> None:
    trust, offers = Trust(), [Offer(3, {(1,): 0.5, (9,): 0.5})]
    # The model drew 1; 9 stands beside it.
    outcome = Outcome(Tree((-1, -1)), [1, 9], [0], first=1)
    assert list(outcome.places()) == [((), [9], None), ((1,), [], None)]
    trust.count(offers, outcome)
    assert trust.reach(offers)[(9,)] == pytest.approx(0.5 * 4 / 4.5)


@dataclass(frozen=True)
class Guessing(Stateless, FreeProposer):
    """Says always the same, for nothing, and seems to have found it."""

    token: int

    def look_up(self, rows: RowsView, budget: Budget) -> Draft:
        tokens = torch.full((len(rows.running), budget.depth), self.token)
        return Draft.chain(tokens, match_length=3)


class Knowing(Oracle):
    """Runs a model to say the text that it knows."""

    runs = "model"

    def propose(self, batch: Any, budget: Budget) -> Draft:
        return replace(super().propose(batch, budget), steps=budget.depth)

    def cost(self, model: Any, adapter: Any) -> float:
        return 0.1


@pytest.mark.parametrize("sampled", [False, True])
def test_a_guess_displaces_no_better_draft_for_long(sampled: bool) -> None:
    model, ids = tiny.llama(), tiny.prompt(5, 2)
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": sampled, "eos_token_id": None, "seed": 3}
    if sampled:
        options |= {"temperature": 0.9, "top_k": None}
    text = selfspec.wrap(model).generate(ids, accept="coupled", **options).sequences
    never = next(token for token in range(tiny.VOCABULARY) if token not in set(text.flatten().tolist()))
    spec = selfspec.wrap(model, Cascade(Guessing(never), Knowing(Tree.chain(3), text[:, 5:])), draft_length=3)
    out = spec.generate(ids, accept="coupled", **options)
    assert torch.equal(out.sequences, text)
    # Four rounds of guesses, and then whole drafts.
    assert out.stats.rounds <= 4 + -(-56 // 4) + 1


def watched(spec: selfspec.SelfSpeculative, rule: str) -> list[Draft]:
    """Have the wrapper judge by a rule, and note what it is shown."""
    drafts: list[Draft] = []

    class Watched(type(find_rule(rule))):  # type: ignore[misc]
        def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
            drafts.append(draft)
            found: Tensor = super().accept_probs(draft, p, logits)
            return found

    spec.rule = Watched()
    return drafts


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rows_with_a_match_take_it_and_others_what_the_model_drafts(llama: PreTrainedModel, rule: str) -> None:
    # The text of the first row comes again; that of the second never did.
    ids = torch.tensor([[5, 6, 7, 8, 5, 6], [11, 12, 13, 14, 15, 16]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": None, "seed": 0}
    spec = selfspec.wrap(llama, Cascade(PromptLookup(shortest=2), EarlyExit(2)), draft_length=3)
    drafts = watched(spec, rule)
    next(spec.stream(ids, **options))
    (draft,) = drafts
    assert draft.tokens[0].tolist() == [7, 8, 5]
    assert draft.probs is not None
    assert torch.equal(draft.probs[0], torch.nn.functional.one_hot(draft.tokens[0], tiny.VOCABULARY).to(draft.probs))
    assert float(draft.probs[1].amax()) < 1
    alone = watched(exits := selfspec.wrap(llama, EarlyExit(2), draft_length=3), rule)
    next(exits.stream(ids, **options))
    assert torch.equal(draft.tokens[1], alone[0].tokens[1])


def test_the_likeliest_path_takes_the_likeliest_token_at_each_place() -> None:
    reach = {(1,): 0.4, (2,): 0.5, (1, 3): 0.39, (2, 4): 0.1, (2, 5): 0.2, (2, 5, 6): 0.1}
    assert likeliest_path(reach, 3) == (2, 5, 6)
    assert likeliest_path(reach, 2) == (2, 5)
    assert likeliest_path({}, 3) == ()


def test_trust_is_a_rows_own_where_rows_are_apart() -> None:
    rows: Any = SimpleNamespace(size=2, memories={}, rows_apart=True, source=lambda row: [])
    apart = Suffixes().begin(rows)
    rows.rows_apart = False
    together = Suffixes().begin(rows)
    assert apart.trust(0) is apart.trust(0) is not apart.trust(1)
    assert together.trust(0) is together.trust(1)


@pytest.mark.parametrize("draft", [PromptLookup(shortest=1), Suffixes(), Recycling()], ids=repr)
def test_nothing_is_found_in_padding(llama: PreTrainedModel, draft: Drafter) -> None:
    # Were it text, the last token would have stood before, with others after it.
    ids = torch.tensor([[14, 20, 21, 11, 12, 13, 14], [5, 6, 7, 8, 9, 5, 6]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
    spec = selfspec.wrap(llama, draft, draft_length=3)
    for asked, length in (((0,), 0), ((1,), 3)):
        rows = list(asked)
        options: dict[str, Any] = {"attention_mask": mask[rows], "do_sample": False, "max_new_tokens": 9}
        spec.forget()
        assert len(next(spec.stream(ids[rows], **options)).rows[0].draft) == length
