"""Rows beside each other are what each is alone, in random mixes too; what goes wrong in one ends that row alone."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteriaList

import selfspec
from helpers import tiny
from helpers.joints import PAIR, THREE, Warp, brief_joint, holm_rejects, network, p_value
from helpers.serving import Alternating, Asked, Breaking, Seen, Stepped, alone, check_mix, random_requests, small
from helpers.shrunken import shrunken
from selfspec.cache.shared_cache import SharedCache
from selfspec.control import Control, CostAware, FixedLength
from selfspec.decode.group import Group
from selfspec.draft import Budget, Draft, Stateless, Verdict
from selfspec.draft.rows_view import RowsView
from selfspec.errors import RowError
from selfspec.runtime.request import PassResult
from selfspec.serve.events import Committed
from selfspec.serve.row_decoder import LogprobRecords
from selfspec.serve.row_request import RowRequest


class Spoiling(LogitsProcessor):
    """Spoils the scores behind texts of six tokens and more."""

    stateless = True

    def __init__(self, spoil: Callable[[Tensor], Tensor]) -> None:
        self._spoil = spoil

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self._spoil(scores) if input_ids.shape[1] >= 6 else scores


class BreaksAtDrafts(LogitsProcessor):
    stateless = True

    def __init__(self, text: list[int]) -> None:
        self._text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids[0].tolist() != self._text[: input_ids.shape[1]]:
            raise AssertionError("a text that is not the model's")
        return scores


PROMPT, BESIDE = (1, 2, 3), (5, 4)
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "top_k": 0}


def run_beside(
    model: PreTrainedModel, draft: str | None, request: RowRequest, length: Control | None = None, sampled: bool = True
) -> Seen:
    """What is seen of a row beside others, greedy and seeded, which are what they are alone."""
    engine = Stepped(selfspec.wrap(model, draft, draft_length=length or (None if draft is None else 3)))
    asked = [RowRequest(BESIDE, 20, GREEDY)] + [RowRequest(BESIDE, 20, SAMPLED, 3)] * sampled
    others, seen = [engine.submit(each) for each in asked], engine.submit(request)
    engine.run()
    # Its slots are clean for whoever comes next.
    others += [engine.submit(each) for each in asked]
    engine.run()
    for each, request in zip(others, asked * 2, strict=True):
        assert each.tokens == alone(model, Asked(request))
    return seen


@pytest.mark.parametrize(
    ("draft", "temperature", "sampled"),
    [("exit:1", 0.0, True), ("exit:1", 0.8, True), (None, 0.0, True), (None, 0.8, True), (None, 0.0, False)],
)
@pytest.mark.parametrize(
    ("made", "cause"),
    [
        (lambda: Breaking(6, stateless=True), ArithmeticError),
        (lambda: Breaking(6, stateless=False), ArithmeticError),
        (lambda: Spoiling(lambda scores: scores[:, :3]), selfspec.errors.UnsupportedOptionError),
    ],
    ids=["stateless", "with memory", "misshapen"],
)
def test_a_processor_that_fails(
    draft: str | None,
    temperature: float,
    sampled: bool,
    made: Callable[[], LogitsProcessor],
    cause: type[Exception],
) -> None:
    model, plain = small(), RowRequest(PROMPT, 12, SAMPLED if temperature else GREEDY, 1)
    seen = run_beside(model, draft, Asked(plain, (made,)).fresh(), sampled=sampled)
    assert isinstance(seen.end.error, RowError)
    assert isinstance(seen.end.error.__cause__, cause)
    expected = alone(model, Asked(plain))[:3]
    assert seen.tokens == expected[: len(seen.tokens)]
    # A processor with memory may break a round of which other tokens were accepted.
    assert len(seen.tokens) == 3 or made().__dict__.get("stateless") is False


def test_a_sampled_row_without_a_token_to_choose_ends() -> None:
    banning = Spoiling(lambda scores: torch.full_like(scores, -torch.inf))
    seen = run_beside(small(), "exit:1", RowRequest(PROMPT, 12, {**SAMPLED, "logits_processor": [banning]}, 1))
    assert isinstance(seen.end.error, RowError)
    assert "no token to choose" in str(seen.end.error)
    assert len(seen.tokens) == 3


@pytest.mark.parametrize("draft", ["lookup", "recycle", "exit:1"])
@pytest.mark.parametrize("nodes", [3, 7])
def test_a_processor_may_fail_at_what_only_drafts_have(draft: str, nodes: int) -> None:
    model = small()
    text = [*PROMPT, *alone(model, Asked(RowRequest(PROMPT, 12, GREEDY)))]
    request = RowRequest(PROMPT, 12, {**GREEDY, "logits_processor": [BreaksAtDrafts(text)]})
    seen = run_beside(model, draft, request, selfspec.FixedLength(3, nodes=nodes))
    assert seen.end.error is None
    assert [*PROMPT, *seen.tokens] == text


def test_a_row_whose_logits_are_not_finite_ends_alone() -> None:
    model = small()
    # No other text has this token, and no draft proposes it: the head is another matrix.
    model.get_input_embeddings().weight.data[23] = torch.nan
    seen = run_beside(model, "lookup", RowRequest((1, 23, 2), 12, GREEDY))
    assert isinstance(seen.end.error, RowError)
    assert "NaN or infinite after 0 new tokens" in str(seen.end.error)


MARKED = RowRequest(PROMPT, 12, GREEDY)


@dataclass(frozen=True)
class Faulty(Stateless):
    """Guesses that the last token comes again; where a marked text has five tokens or more something goes wrong.

    Attributes:
        where: "propose", "ids" (it drafts what no head writes), "ask" or "learn".
        rows: the fewest rows beside which it does.
    """

    where: str
    rows: int = 1

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        self._fail(rows, "propose")
        tokens = rows.last_tokens.expand(-1, 2).clone()
        marked = [index for index, row in enumerate(rows.running) if self._marks(rows, row)]
        tokens[marked] = 99 if self.where == "ids" else 0
        return Draft.chain(tokens)

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        self._fail(rows, "learn")

    def _marks(self, rows: RowsView, row: int) -> bool:
        return rows.text(row)[:3] == [*MARKED.input_ids] and rows.text_length(row) >= 5

    def _fail(self, rows: RowsView, where: str) -> None:
        if (
            where == self.where
            and len(rows.running) >= self.rows
            and any(self._marks(rows, row) for row in rows.running)
        ):
            raise ArithmeticError("this draft breaks here")


def breaks(*given: Any) -> Any:
    raise ArithmeticError("this row breaks here")


class Unkept(LogprobRecords):
    keep = breaks  # type: ignore[assignment]


class Untold(LogprobRecords):
    take = breaks  # type: ignore[assignment]


def with_record(row: Group, record: type[LogprobRecords]) -> None:
    row.records = record(top=1)


def with_criterion(row: Group) -> None:
    row.whole = replace(row.stopping, criteria=StoppingCriteriaList([breaks]))


FAULTS: dict[str, tuple[Any, Callable[[Group], None]]] = {
    "draft": (Faulty("propose"), lambda row: None),
    "draft of no token": (Faulty("ids"), lambda row: None),
    "learning": (Faulty("learn"), lambda row: None),
    "criterion": ("lookup", with_criterion),
    "record": ("lookup", lambda row: with_record(row, Unkept)),
    "answer": ("lookup", lambda row: with_record(row, Untold)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_that_fails_in_any_step_ends_alone(fault: str) -> None:
    draft, spoil = FAULTS[fault]
    model = small()
    asked = [
        Asked(RowRequest(BESIDE, 20, GREEDY, logprobs=2)),
        Asked(RowRequest(BESIDE, 20, SAMPLED, 3)),
        Asked(RowRequest(BESIDE, 20, GREEDY), made=(Alternating,)),
    ]
    engine = Stepped(selfspec.wrap(model, draft, draft_length=2), max_rows=5)
    others = [engine.submit(each.fresh()) for each in asked]
    row = engine._decoder.row(MARKED)
    spoil(row)
    failing = engine.submit_row(row)
    engine.run()
    assert failing.end.reason == "error"
    assert isinstance(failing.end.error, RowError)
    assert isinstance(failing.end.error.__cause__, IndexError | RuntimeError if "token" in fault else ArithmeticError)
    assert failing.tokens == alone(model, Asked(MARKED))[: len(failing.tokens)]
    for each, request in zip(others, asked, strict=True):
        assert each.tokens == alone(model, request)
    told = [len(event.logprobs or ()) for event in others[0].events if isinstance(event, Committed)]
    assert sum(told) == len(others[0].tokens)
    assert engine.scheduler.stats().cache_bytes == 0


def test_rows_of_which_none_fails_alone_go_on_for_a_few_rounds_and_then_end() -> None:
    model = small()
    engine = Stepped(selfspec.wrap(model, Faulty("propose", rows=2), draft_length=2))
    seen = [engine.submit(MARKED), engine.submit(replace(MARKED, input_ids=(2, 4)))]
    engine.run()
    for each, request in zip(seen, (MARKED, replace(MARKED, input_ids=(2, 4))), strict=True):
        assert isinstance(each.end.error, RowError)
        assert 3 <= len(each.tokens) < 12
        assert each.tokens == alone(model, Asked(request))[: len(each.tokens)]


DRAFTS: dict[str, tuple[str | None, int | Control | None]] = {
    "exit": ("exit:1", 3),
    "tree": ("exit:1", FixedLength(3, nodes=6)),
    "lookup": ("lookup", 4),
    "int8": ("int8", 3),
    "cascade": ("lookup+exit:1", 4),
    "recycle": ("recycle", FixedLength(3, nodes=6)),
    "suffix": ("suffix", FixedLength(3, nodes=6)),
    "suffix+recycle": ("suffix+recycle+exit:1", CostAware(3, nodes=6)),
    "cost aware": ("lookup+exit:2", None),
    "none": (None, None),
}
MOST = 26


def run_mix(model: PreTrainedModel, number: int, requests: int, draft: str) -> Stepped:
    rng = random.Random(number)
    name, length = DRAFTS[draft]
    spec = selfspec.wrap(model, name, draft_length=length)
    tokens = rng.choice([MOST, 2 * MOST, 5 * MOST, None])
    engine = Stepped(spec, rng.randint(1, 9), rng.choice([1, 3, 16, 200]), tokens, rng.choice([0, 4, 64]))
    asked = random_requests(rng, requests, engine.vocabulary, MOST)
    check_mix(model, engine, asked)
    return engine


MIXES = [
    *((torch.float64, sum(map(ord, draft)), 10, draft) for draft in DRAFTS),
    *(
        pytest.param(torch.float32 if number % 4 == 3 else torch.float64, number, 32, draft, marks=pytest.mark.contract)
        for number, draft in enumerate([*DRAFTS, *DRAFTS])
    ),
]


@pytest.mark.parametrize(("dtype", "number", "requests", "draft"), MIXES)
def test_rows_of_a_mix_are_what_they_are_alone(dtype: torch.dtype, number: int, requests: int, draft: str) -> None:
    run_mix(small(dtype=dtype), number, requests, draft)


@pytest.mark.parametrize(
    ("architecture", "draft"),
    [
        pytest.param("bloom", "exit", marks=pytest.mark.contract),
        pytest.param("gemma2", "tree", marks=pytest.mark.contract),
        pytest.param("mamba2", "lookup", marks=pytest.mark.contract),
        ("lfm2", "exit"),
        ("mistral", "exit"),
        ("gpt2", "exit"),
        pytest.param("qwen3_next", "lookup", marks=pytest.mark.contract),
    ],
)
def test_other_architectures(architecture: str, draft: str) -> None:
    made = tiny.BUILDERS.get(architecture)
    model = shrunken(architecture).double() if made is None else made(vocab_size=24, num_hidden_layers=3)
    run_mix(model, 7, 5, draft)


@pytest.mark.contract
def test_no_cache_outlives_its_rows() -> None:
    def alive() -> int:
        gc.collect()
        return sum(isinstance(each, SharedCache) for each in gc.get_objects())

    before = alive()
    engine = run_mix(small(), 3, 6, "cascade")
    assert alive() == before
    assert not engine.scheduler.busy


WARPS = (Warp(), Warp(temperature=0.6), Warp(temperature=1.4, top_k=4))


def draws(draft: str, accept: str | None) -> dict[str, float]:
    """How well rows of each kind fit their joint, p-values: drawn ones of several settings, and coupled ones."""
    model = network()
    name, length = DRAFTS[draft]
    engine = Stepped(selfspec.wrap(model, name, draft_length=length, accept=accept), 32, 64)
    drawn: dict[Warp, list[Seen]] = {warp: [] for warp in WARPS}
    coupled: list[Seen] = []
    for number in range(500):
        for warp, seen in drawn.items():
            seen.append(engine.submit(_request(warp, None)))
        coupled.append(engine.submit(_request(WARPS[0], number)))
        # Beside them rows of other lengths, which change how long drafts are, and greedy ones.
        other = GREEDY if number % 2 else {"do_sample": True, "temperature": 2.0}
        engine.submit(RowRequest((3, 1, 4), 1 + number % 9, other))
    engine.run()
    joints = {warp: brief_joint(model, warp) for warp in WARPS}
    kinds = [(str(warp), warp, seen) for warp, seen in drawn.items()] + [("coupled", WARPS[0], coupled)]
    return {name: p_value([tuple(each.tokens) for each in seen], joints[warp]) for name, warp, seen in kinds}


def _request(warp: Warp, seed: int | None) -> RowRequest:
    sampled = {"do_sample": True, "temperature": warp.temperature, "top_k": warp.top_k}
    return RowRequest(PAIR, THREE, sampled, seed)


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("draft", "accept"),
    [
        ("exit", None),
        ("exit", "coupled"),
        ("tree", "token"),
        ("cascade", None),
        ("cascade", "coupled"),
        ("recycle", "token"),
    ],
)
def test_sampled_rows_of_a_crowded_batch_follow_the_joint(draft: str, accept: str | None) -> None:
    assert holm_rejects(draws(draft, accept), 0.01) == []
