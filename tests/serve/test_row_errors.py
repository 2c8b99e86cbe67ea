"""What goes wrong in one row ends that row alone, with a typed error; the others are what they are alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteriaList

import selfspec
from helpers.serving import Alternating, Asked, Breaking, Seen, Stepped, alone, small
from selfspec.control import Control
from selfspec.decode.group import Group
from selfspec.decode.output import LogprobRecord
from selfspec.draft import Budget, Draft, Stateless, Verdict
from selfspec.draft.rows_view import RowsView
from selfspec.errors import RowError
from selfspec.runtime.request import PassResult
from selfspec.serve.events import Committed
from selfspec.serve.row_request import RowRequest, SamplingParams, read_row


class Banning(LogitsProcessor):
    stateless = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf) if input_ids.shape[1] >= 6 else scores


class Misshapen(LogitsProcessor):
    stateless = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores[:, :3] if input_ids.shape[1] >= 6 else scores


class BreaksAtDrafts(LogitsProcessor):
    """Raises at texts that end with a token which the model itself never chooses there."""

    stateless = True

    def __init__(self, text: list[int]) -> None:
        self._text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids[0].tolist() != self._text[: input_ids.shape[1]]:
            raise AssertionError("a text that is not the model's")
        return scores


PROMPT, BESIDE = (1, 2, 3), (5, 4)
GREEDY = SamplingParams(temperature=0.0)


def run_beside(
    model: PreTrainedModel, draft: str | None, request: RowRequest, length: Control | None = None, sampled: bool = True
) -> Seen:
    """What is seen of a row beside others, greedy and seeded, which are what they are alone."""
    engine = Stepped(selfspec.wrap(model, draft, draft_length=length or (None if draft is None else 3)))
    seeded = [SamplingParams(temperature=0.9, top_k=0, seed=3)] if sampled else []
    asked = [RowRequest(BESIDE, 20, sampling) for sampling in (GREEDY, *seeded)]
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
        (Misshapen, selfspec.errors.UnsupportedOptionError),
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
    model, plain = small(), SamplingParams(temperature=temperature, top_k=0, seed=1)
    seen = run_beside(model, draft, RowRequest(PROMPT, 12, replace(plain, processors=(made(),))), sampled=sampled)
    assert isinstance(seen.end.error, RowError)
    assert isinstance(seen.end.error.__cause__, cause)
    expected = alone(model, Asked(RowRequest(PROMPT, 12, plain)))[:3]
    assert seen.tokens == expected[: len(seen.tokens)]
    # A processor with memory may break a round of which other tokens were accepted.
    assert len(seen.tokens) == 3 or made().__dict__.get("stateless") is False


def test_a_sampled_row_without_a_token_to_choose_ends() -> None:
    sampling = SamplingParams(temperature=1.0, top_k=0, seed=1, processors=(Banning(),))
    seen = run_beside(small(), "exit:1", RowRequest(PROMPT, 12, sampling))
    assert isinstance(seen.end.error, RowError)
    assert "no token to choose" in str(seen.end.error)
    assert len(seen.tokens) == 3


@pytest.mark.parametrize("draft", ["lookup", "recycle", "exit:1"])
@pytest.mark.parametrize("nodes", [3, 7])
def test_a_processor_may_fail_at_what_only_drafts_have(draft: str, nodes: int) -> None:
    model = small()
    text = [*PROMPT, *alone(model, Asked(RowRequest(PROMPT, 12, GREEDY)))]
    request = RowRequest(PROMPT, 12, replace(GREEDY, processors=(BreaksAtDrafts(text),)))
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


class Unkept(LogprobRecord):
    keep = breaks  # type: ignore[assignment]


class Untold(LogprobRecord):
    take = breaks  # type: ignore[assignment]


def with_record(row: Group, record: type[LogprobRecord]) -> None:
    row.records = replace(row.records, logprobs=record(1))


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


def of_every_kind() -> list[Asked]:
    return [
        Asked(RowRequest(BESIDE, 20, GREEDY, logprobs=2)),
        Asked(RowRequest(BESIDE, 20, SamplingParams(temperature=0.9, top_k=0, seed=3))),
        Asked(RowRequest(BESIDE, 20, GREEDY), made=(Alternating,)),
    ]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_that_fails_in_any_step_ends_alone(fault: str) -> None:
    draft, spoil = FAULTS[fault]
    model, asked = small(), of_every_kind()
    engine = Stepped(selfspec.wrap(model, draft, draft_length=2), max_rows=5)
    others = [engine.submit(each.fresh()) for each in asked]
    row = read_row(engine._decoder, MARKED)
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
