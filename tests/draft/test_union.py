"""Unions: what sources without a model know, in one tree with what a model drew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.chains import conditionals
from helpers.drafting import GREEDY, ModelDrafts, Offering, Remembering, stock
from helpers.exact import committed_in_step_of
from selfspec.accept import Block, Rule, TokenLevel
from selfspec.cache.tree import Tree
from selfspec.control import CostAware, FixedLength
from selfspec.control.costs import Costs
from selfspec.draft import Budget, Draft, EarlyExit, Proposer, Recycling, RowsView, Suffixes, Union
from selfspec.draft.draft import RowOutcome
from selfspec.draft.union import FreeUnionProposer, UnionProposer


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
    control.learn(draft, [RowOutcome(2, 2, 3, strayed=2)])
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
    """Has drawn the chains of a draft."""

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
        return UnionProposer(FreeUnionProposer(rows, [free]), Drew(drawn)).propose(rows, Budget(2, 3))

    generator = torch.Generator().manual_seed(seed)
    row, beside = ((conditionals(3, range(1, 4), generator), conditionals(3, range(1, 3), generator)) for _ in range(2))
    result = committed_in_step_of(rule, row, beside, proposed)
    torch.testing.assert_close(result.joint, row[0].joint(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("draft", ["recycle", "suffix"])
def test_processors_with_memory_get_a_chain(llama: PreTrainedModel, draft: str) -> None:
    spec, ids = selfspec.wrap(llama, draft, draft_length=5), tiny.prompt(9)
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList([Remembering()]), "max_new_tokens": 32}
    for _ in range(2):
        output = spec.generate(ids, **GREEDY, **options)
        assert torch.equal(output.sequences, stock(llama, ids, 32))
    assert output.stats.accepted > 0
