"""Rows of a batch: kept in step none commits more than the others; what one draws does not depend on the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import Altered, Propose, Remembering, poisoning
from helpers.joints import EOS, PROMPTS, Warp, p_values, small
from helpers.tiny import in_turns
from selfspec.control import Control, Controller
from selfspec.control.costs import CostsByRows
from selfspec.decode.noise import Noise
from selfspec.decode.output import Round
from selfspec.draft import Budget, Draft, Drafter, RowsView, Stateless

CHEAP = selfspec.Costs(draft=0.1)

NEW = 60
GOOD = selfspec.drafts.LayerSkip(mlp=[3])


@dataclass
class InStep(Control, Controller):
    """Keeps rows in step to the end; drafts end where no row is confident any more."""

    longest: int = 3
    threshold: float = 0.0

    def __post_init__(self) -> None:
        Controller.__init__(self, Budget.chain(self.longest))

    def begin(self, costs: CostsByRows) -> Controller:
        return self

    def goes_on(self, confidences: Callable[[], list[float]]) -> bool:
        return max(confidences()) >= self.threshold

    def keeps_lockstep(self) -> bool:
        return True


def committed(chunk: Round) -> set[int]:
    return {len(row.tokens) for row in chunk.rows}


def accepts_unevenly(model: PreTrainedModel, draft: Drafter, prompts: Tensor) -> bool:
    """Whether rows would be out of step in the first rounds if nothing kept them in step."""
    stream = selfspec.wrap(model, draft, draft_length=7).stream(prompts, max_new_tokens=NEW, do_sample=False)
    return any(len(committed(next(stream))) > 1 for _ in range(3))


@dataclass(frozen=True)
class OneRow(Stateless):
    """Knows the text, and makes use of it for one row of four, in turns; its steps cost as much as any draft's."""

    text: Tensor

    def propose(self, batch: RowsView, budget: Budget) -> Draft:
        if not batch.controller.tries(0):
            return batch.no_draft()
        starts = [batch.text_length(row) for row in range(4)]
        length = budget.depth
        rows = [self.text[row, start : start + length].tolist() for row, start in enumerate(starts)]
        right = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        wrong = (right + 1) % tiny.VOCABULARY
        chosen = torch.arange(4) == (starts[0] % 4)
        return Draft.chain(torch.where(chosen[:, None], right, wrong), steps=length)


def test_rows_stay_in_step_where_drafts_are_worth_nothing() -> None:
    # Prompts too short to show that an exit is worth nothing.
    model, prompts = tiny.llama(), tiny.prompt(4, batch=4)
    text = model.generate(prompts, do_sample=False, max_new_tokens=NEW)
    for draft in (OneRow(text), selfspec.drafts.EarlyExit(1)):
        # As cheap as a draft must be to be tried in a batch, and not as cheap as these would have to be to pay.
        control = selfspec.CostAware(costs=selfspec.Costs(draft=0.3, verify=1.1, widening=0.03))
        spec = selfspec.wrap(model, draft, draft_length=control)
        stream = spec.stream(prompts, max_new_tokens=NEW, do_sample=False)
        chunks = list(stream)
        assert any(chunk.rows[0].draft for chunk in chunks)
        assert all(len(committed(chunk)) == 1 for chunk in chunks)
        assert torch.equal(stream.output().sequences, text)
    assert accepts_unevenly(model, OneRow(text), prompts)


@pytest.mark.contract
@pytest.mark.parametrize("rows", [4, 24])
def test_rows_go_out_of_step_once_drafts_pay_for_it_and_stay_exact(rows: int) -> None:
    # Of many rows one commits next to nothing, so that drafts only pay once rows are out of step.
    model, prompts = tiny.llama(), tiny.prompt(6, batch=rows)
    spec = selfspec.wrap(model, GOOD, draft_length=selfspec.CostAware(costs=CHEAP))
    stream = spec.stream(prompts, max_new_tokens=NEW, do_sample=False)
    chunks = list(stream)
    in_step = [len(committed(chunk)) == 1 for chunk in chunks]
    assert accepts_unevenly(model, GOOD, prompts)
    assert all(in_step[:4])
    assert not all(in_step[4:8])
    assert torch.equal(stream.output().sequences, model.generate(prompts, do_sample=False, max_new_tokens=NEW))


def test_rows_are_in_step_until_one_ends_and_again_when_it_is_run_no_more() -> None:
    model, prompts = tiny.llama(), tiny.prompt(5, batch=4)

    def own_length(ids: Tensor, scores: Any) -> Tensor:
        return torch.tensor([ids.shape[1] >= 5 + length for length in (4, 20, 9, 20)])

    cursors: list[set[int]] = []

    def noting(propose: Propose, batch: Any, budget: Budget) -> Draft:
        lengths = zip(batch.running, batch.cache.seq_lens, strict=True)
        cursors.append({length for row, length in lengths if row in batch.unfinished})
        return propose(batch, budget)

    spec = selfspec.wrap(model, Altered(selfspec.drafts.LayerSkip(mlp=[3]), noting), draft_length=InStep(4))
    out = spec.generate(prompts, max_new_tokens=24, do_sample=False, stopping_criteria=[own_length])
    wanted = model.generate(prompts, max_new_tokens=24, do_sample=False)
    assert out.lengths == (4, 20, 9, 20)
    for row, length in enumerate(out.lengths):
        assert torch.equal(out.sequences[row, : 5 + length], wanted[row, : 5 + length])
    assert {len(lengths) for lengths in cursors} == {1}
    assert out.stats.rounds < 20


def test_rows_of_different_lengths_are_not_brought_into_lockstep() -> None:
    model = tiny.llama()
    ids, mask = tiny.prompt(6, batch=2), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 1 + NEW, "do_sample": False}
    kept, free = (next(selfspec.wrap(model, GOOD, draft_length=each).stream(ids, **options)) for each in (InStep(7), 7))
    assert kept == free
    assert len(committed(kept)) > 1


@pytest.mark.statistical
@pytest.mark.parametrize(("rows", "batches"), [(3, 400), (2048, 3)], ids=["few rows", "many rows"])
@pytest.mark.parametrize(
    ("rule", "control", "eos"),
    [
        ("token", InStep(3), None),
        ("token", InStep(3, threshold=0.45), EOS),
        ("block", InStep(2), EOS),
        ("block", InStep(3, threshold=0.45), None),
    ],
)
def test_samples_follow_the_exact_joint(rule: str, control: Control, eos: int | None, rows: int, batches: int) -> None:
    # Three rows are cut now and then, and at any place; of many, one is always rejected at once.
    spec = selfspec.wrap(small(), selfspec.drafts.EarlyExit(2), draft_length=control, accept=rule)
    (fit,) = p_values(spec, Warp(), eos, prompts=PROMPTS[:1], rows=rows, batches=batches).values()
    assert fit > 0.0025


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_rounds_counts_and_scores_are_those_of_what_was_committed(llama: PreTrainedModel, rule: str) -> None:
    prompts = tiny.prompt(5, batch=3)
    stream = selfspec.wrap(llama, GOOD, draft_length=InStep(4), accept=rule).stream(
        prompts, max_new_tokens=20, do_sample=True, top_k=None, seed=1,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    chunks = list(stream)
    out: Any = stream.output()
    assert any(row.accepted == len(row.tokens) < len(row.draft) for chunk in chunks for row in chunk.rows)
    for number in range(3):
        rows = [chunk.rows[number] for chunk in chunks]
        assert [token for row in rows for token in row.tokens] == out.sequences[number, 5:].tolist()
        for row in rows:
            assert row.tokens[: row.accepted] == row.draft[: row.accepted]
    with torch.no_grad():
        logits = llama(out.sequences).logits[:, 4:-1].float()
    torch.testing.assert_close(torch.stack(out.logits, 1), logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.stack(out.scores, 1), logits, atol=1e-5, rtol=1e-5)
    stats = out.stats
    assert stats.new_tokens == 60
    assert stats.accepted == sum(row.accepted for chunk in chunks for row in chunk.rows)
    assert all(a <= b for a, b in zip(stats.accepted_per_depth, stats.judged_per_depth, strict=True))


def test_a_row_that_is_not_finite_does_not_stall_the_others() -> None:
    # Masked or not, NaN among the keys reaches the whole row under this kernel.
    model, prompts = tiny.llama(attention="eager"), tiny.prompt(6, batch=3)
    expected = model.generate(prompts, do_sample=False, max_new_tokens=24)
    drafter = poisoning(model, selfspec.drafts.EarlyExit(3), expected, rows=slice(1), rounds=[3])
    stream = selfspec.wrap(model, drafter, draft_length=InStep(3)).stream(prompts, do_sample=False, max_new_tokens=24)
    chunks = list(stream)
    assert any(not chunk.rows[0].tokens and chunk.rows[1].tokens and chunk.rows[2].tokens for chunk in chunks)
    assert torch.equal(stream.output().sequences, expected)


ROWS, WIDTH, NEW = 5, 9, 20
PADDING = (0, 3, 0, 4, 1)
# Many tokens that end a row, so that rows end at different times and are dropped from the batch.
ENDS = [3, 17, 29]
DRAFTS: dict[str, Drafter | str | None] = {
    "plain": None,
    "exit": "exit:2",
    "skip": "skip:attn=1;mlp=3",
    "8 bits": "int8",
    "look-up": selfspec.drafts.PromptLookup(shortest=1),
    "suffixes": "suffix",
    "recycling": "recycle",
    "cascade": selfspec.drafts.Cascade(selfspec.drafts.PromptLookup(shortest=1), selfspec.drafts.EarlyExit(2)),
    "cascade of three": "lookup+recycle+exit:2",
}


def prompts(seed: int = 0) -> dict[str, Tensor]:
    """Rows of different lengths over few tokens, so that some have a match for a look-up and others none."""
    ids = tiny.prompt(WIDTH, ROWS, seed=seed, vocabulary=12)
    mask = torch.stack([torch.arange(WIDTH) >= padding for padding in PADDING]).long()
    return {"input_ids": ids.where(mask > 0, 0), "attention_mask": mask}


def chosen(batch: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    return {name: values[rows] for name, values in batch.items()}


SAMPLED: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9}


def texts(spec: selfspec.SelfSpeculative, batch: dict[str, Any], **options: Any) -> list[list[int]]:
    out = spec.generate(**batch, **{**SAMPLED, "eos_token_id": ENDS, "pad_token_id": 0, **options})
    return [row[:length] for row, length in zip(out.sequences[:, WIDTH:].tolist(), out.lengths, strict=True)]


@pytest.mark.parametrize("draft", ["suffixes", "recycling"])
def test_sampled_rows_teach_later_calls(llama: PreTrainedModel, draft: str) -> None:
    spec = selfspec.wrap(llama, DRAFTS[draft], draft_length=3, accept="token")
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.1, "max_new_tokens": 24, "pad_token_id": 0}
    options = {**options, **prompts()}
    first, again = (spec.generate(**options, seed=4).stats for _ in range(2))
    assert again.mean_accepted_length > first.mean_accepted_length


# Rows that have ended are run no more.

LENGTHS = (4, 13, 1, 24, 10)
KINDS = ("plain", "exit", "skip", "8 bits")
# Rows that have ended are padded where there is an end token; this one never comes.
GREEDY: dict[str, Any] = {
    "max_new_tokens": 24,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": 49,
    "suppress_tokens": [49],
}
OPTIONS: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.05}, {"no_repeat_ngram_size": 6}]


def batches(model: PreTrainedModel) -> list[int]:
    """Notes how many rows each pass over the embeddings reads."""
    seen: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[0]))
    return seen


def own_length(ids: Tensor, scores: Any) -> Tensor:
    """Ends each row at a length of its own."""
    return torch.tensor([ids.shape[1] >= WIDTH + length for length in LENGTHS])


@pytest.mark.parametrize(("architecture", "options", "draft"), in_turns(sorted(tiny.BUILDERS), OPTIONS, KINDS))
def test_greedy_rows_are_what_they_are_alone(architecture: str, draft: str, options: dict[str, Any]) -> None:
    model = tiny.BUILDERS[architecture]()
    options = {**prompts(), **GREEDY, **options}
    wanted = model.generate(**options)
    seen = batches(model)
    spec = selfspec.wrap(model, DRAFTS[draft], draft_length=3)
    stream, run = spec.stream(**options, stopping_criteria=[own_length]), set()
    for chunk in stream:
        # Never as many ended rows as live ones.
        live = sum(bool(row.tokens) for row in chunk.rows)
        assert seen[-1] < 2 * live
        run.add(seen[-1])
    out = stream.output()
    assert out.lengths == LENGTHS
    for row, length in enumerate(LENGTHS):
        assert torch.equal(out.sequences[row, : WIDTH + length], wanted[row, : WIDTH + length])
    assert {1, ROWS} <= run


def in_order() -> LogitsProcessorList:
    return LogitsProcessorList([Remembering()])


@pytest.mark.parametrize("draft", ["plain", "exit", "skip", "look-up", "cascade"])
@pytest.mark.parametrize(("rule", "memory"), [("token", True), ("block", False), ("coupled", True)])
def test_dropping_rows_that_have_ended_changes_nothing(
    llama: PreTrainedModel, draft: str, rule: str, memory: bool
) -> None:
    spec = selfspec.wrap(llama, DRAFTS[draft], draft_length=3, accept=rule)
    processors = in_order() if memory else LogitsProcessorList()
    seen = batches(llama)
    dropped = texts(spec, prompts(), seed=7, logits_processor=processors)
    assert min(seen) < ROWS
    seen.clear()
    # A cache that is returned keeps all its rows.
    assert texts(spec, prompts(), seed=7, logits_processor=processors, return_dict_in_generate=True) == dropped
    assert set(seen) == {ROWS}


# The others draft trees where places need not be judged in order.
@pytest.mark.parametrize("draft", [*KINDS, "look-up", "cascade"])
def test_a_draft_that_is_judged_in_order_uses_the_same_noise(llama: PreTrainedModel, draft: str) -> None:
    spec = selfspec.wrap(llama, DRAFTS[draft], draft_length=3, accept="token")
    for row in (0, 3):
        found = []
        for processors in (LogitsProcessorList(), in_order()):
            spec.forget()
            options: dict[str, Any] = {"max_new_tokens": 14, "logits_processor": processors}
            found.append(texts(spec, chosen(prompts(), [row]), seed=row, **options))
        assert found[0] == found[1]


@pytest.mark.parametrize("draft", ["plain", "exit", "skip", "look-up", "cascade"])
@pytest.mark.parametrize(("rule", "memory"), [("token", False), ("block", True)])
def test_greedy_decoding_draws_nothing(
    llama: PreTrainedModel, draft: str, rule: str, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("uniform", "lots", "race", "choose", "exponentials"):
        monkeypatch.setattr(Noise, name, None)
    before = torch.random.get_rng_state()
    spec = selfspec.wrap(llama, DRAFTS[draft], draft_length=3, accept=rule)
    processors = in_order() if memory else LogitsProcessorList()
    texts(spec, prompts(), do_sample=False, temperature=None, seed=0, logits_processor=processors)
    assert torch.equal(before, torch.random.get_rng_state())
