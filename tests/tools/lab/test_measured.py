"""What is made of raw times: figures worked out by hand, tables and plots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from helpers.studies import CELL, SETTINGS, cell_of, plain, record
from selfspec.decode.output import Stats
from selfspec.measure.estimate import Estimate
from selfspec.tools.lab.bench_report import draw, overview, page
from selfspec.tools.lab.measured import MeasuredCell, calls_without_cycles, doubts, figures, untimed_figures
from selfspec.tools.lab.pass_costs import PassCosts, PeakMemory
from selfspec.tools.lab.record import Record, ShapeCount
from selfspec.tools.lab.turns import TextAgreement

STOCK = record("generate", [[1.1, 2.1], [2.1, 4.1]], cycle_share=[[0.0, 0.5], [0.1, 0.5]])
PLAIN = plain([[1.7, 1.7], [1.7, 1.7]])


def known(value: float) -> Estimate:
    return Estimate(value, value, value)


def drafting(**fields: object) -> Record:
    """A draft that took half the time of plain decoding: 4 rounds a call of three draft steps, 4 plain ones."""
    counts = Stats(
        rounds=32,
        row_rounds=32,
        new_tokens=64,
        drafted=48,
        judged_per_depth=[16, 12, 10],
        accepted_per_depth=[12, 10, 10],
        seconds={"prefill": 0.4, "draft": 0.8, "verify": 2.0, "accept": 0.2, "commit": 0.1},
    )
    rounds = [ShapeCount(3, 3, 16), ShapeCount(0, 0, 16)]
    given = {"counts": counts, "rounds": rounds, "passes": [[8, 8], [8, 8]], **fields}
    return record("draft", [[0.9, 0.9], [0.9, 0.9]], "exit:4", **given)


def shown(record: Record) -> Any:
    """The figures of an arm beside the other two."""
    return figures(record, STOCK, PLAIN)


def test_speeds() -> None:
    found = shown(STOCK)
    assert (found.decoding_tokens_per_second.low, found.decoding_tokens_per_second.high) == pytest.approx((5.0, 10.0))
    assert found.whole_call_tokens_per_second.high == pytest.approx(32 / 3.2)
    assert found.first_token_seconds.value == pytest.approx(0.1)


def test_ratios_are_taken_repeat_by_repeat() -> None:
    found = shown(STOCK)
    assert found.decoding_against["model_generate"].value == 1.0
    against = found.decoding_against["plain"]
    assert (against.low, against.high) == pytest.approx((3.2 / 6, 3.2 / 3))
    assert found.whole_call_against.value == 1.0
    assert figures(PLAIN, None, None).decoding_against == {}


def test_cycles() -> None:
    assert calls_without_cycles(STOCK) == [0]
    assert shown(STOCK).cycle_share == pytest.approx((0.05 + 0.5) / 2)
    calm = shown(PLAIN).decoding_without_cycles
    # Plain decoding took 1.6 s for what took 1 s and then 2 s.
    assert (calm.low, calm.high) == pytest.approx((1 / 1.6, 2 / 1.6))
    cycling = replace(STOCK, cycle_share=[[0.5, 0.5]] * 2)
    assert figures(PLAIN, cycling, PLAIN).decoding_without_cycles is None


def test_mean_accepted_length() -> None:
    assert shown(STOCK).mean_accepted_length.value == 1.0
    assert shown(drafting()).mean_accepted_length.value == 2.0


def test_acceptance() -> None:
    rate = shown(drafting()).acceptance_rate
    assert rate.value == pytest.approx(32 / 38)
    assert shown(drafting()).acceptance_by_depth == pytest.approx([12 / 16, 10 / 12, 1.0])
    assert shown(PLAIN).acceptance_rate is None
    assert shown(PLAIN).acceptance_by_depth == []
    assert shown(STOCK).acceptance_by_depth is None


def test_the_cost_of_a_round() -> None:
    found = shown(drafting())
    cost = found.round_in_plain_steps
    step = 1.6 / 16  # a round of plain decoding
    assert cost.draft == pytest.approx(0.8 / 32 / step)
    assert cost.verify == pytest.approx(2.0 / 32 / step)
    total = cost.draft + cost.verify + cost.rest
    assert total == pytest.approx((3.6 - 0.4) / 32 / step)
    assert (cost.steps, cost.drafted) == (1.5, 1.5)
    # A round commits 2 tokens and costs 1 plain one: twice as fast.
    assert found.mean_accepted_length.value / total == pytest.approx(2.0)
    assert shown(PLAIN).round_in_plain_steps is shown(STOCK).round_in_plain_steps is None


def test_the_prediction() -> None:
    costs = PassCosts(known(0.1), known(0.2), {4: known(1.2)}, {4: known(1.5)}, known(0.05))
    found = shown(drafting(costs=costs)).prediction
    assert found.predicted.value == pytest.approx(64 / (16 * (3 * 0.2 + 1.2) + 16))
    assert found.measured.value == pytest.approx(2.0)
    assert found.efficiency == pytest.approx(2.0 / found.predicted.value)
    looked_up = shown(drafting(costs=costs, rounds=[ShapeCount(3, 0, 16), ShapeCount(0, 0, 16)])).prediction
    assert looked_up.predicted.value == pytest.approx(64 / (16 * 1.5 + 16))


@pytest.mark.parametrize("costs", [None, PassCosts(Estimate(0.1, 0.1, 0.1), None)])
def test_no_prediction_from_costs_that_were_not_timed(costs: PassCosts | None) -> None:
    assert shown(drafting(costs=costs)).prediction is None


def cell(**fields: object) -> MeasuredCell:
    """All that a report may have to show."""
    costs = PassCosts(known(0.1), known(0.2), {4: known(1.2)}, {4: known(1.5)}, known(0.05))
    refused = record("lookup", [[1.0, 1.0]] * 2, agreement=TextAgreement(2, 1))
    absent = record("static", [], absence="no compiler")
    own = drafting(costs=costs, memory=PeakMemory(2**20, 3 * 2**20, "system"), agreement=TextAgreement(2, 2), **fields)
    return cell_of(STOCK, absent, refused, PLAIN, own)


def test_the_report_says_what_was_measured() -> None:
    text = page([cell()]).markdown
    for said in (
        "| selfspec exit:4 | 19 (19-19) |",
        "without cycles (1 of 2 calls)",
        "static cache, compiled: absent. no compiler.",
        "prompt look-up: REFUSED. 1 of 2 greedy texts differ",
        "| 0.75 0.83 1.00 |",
        "| selfspec exit:4 | 1.50 | 1.50 | 0.25 | 0.62 | 0.13 | 0.20 | 1.20 | 0.05 | 1.43 (1.43-1.43) |",
        "| 2.00 (2.00-2.00) | 1.40 |",
        "| 1.0 | 2.0 | 3.0 |",
        "| model.generate, prompt look-up | refused |",
    ):
        assert said in text, said
    assert "| model.generate, prompt look-up | 16" not in text


def test_names_change_nothing_of_the_page(tmp_path: Path) -> None:
    name = "a|b\n# <b>$x^$ [c](d) *e* `f` _g_ ~h~ &amp; \\"
    named = replace(CELL, workload=name)
    settings = replace(SETTINGS, model=f"- {name}")
    arms = tuple(
        replace(each, arm=replace(each.arm, draft=f"skip-file:{name}")) if each.arm.kind == "draft" else each
        for each in cell().arms
    )
    measured = cell_of(*arms, replace(arms[1], absence=name), cell=named, settings=settings)
    usual, odd = (MarkdownIt().enable("table").parse(page([each]).markdown) for each in (cell(), measured))
    shape = [token.type for token in usual]
    # What is doubted is a list, too; the arms that are not scored are the last one.
    absent = len(shape) - shape[::-1].index("bullet_list_open")
    # One more arm is absent; all else is as it is with names of letters.
    assert [token.type for token in odd] == [*shape[:absent], *shape[absent : absent + 5], *shape[absent:]]
    assert {child.type for token in odd for child in token.children or []} <= {"text", "text_special", "softbreak"} | {
        child.type for token in usual for child in token.children or []
    }
    shown = " ".join(name.split())
    texts = ["".join(child.content for child in token.children or []) for token in odd]
    assert f"selfspec skip-file:{shown}" in texts
    assert any(text.startswith(f"{shown}, greedy") for text in texts)
    assert [file.stem for file in draw([measured], tmp_path)] == ["speed", "acceptance"]


def test_the_overview_is_as_narrow_as_it_can_be() -> None:
    arms = len(cell().arms)
    some = [replace(cell(), cell=replace(CELL, workload=f"w/{number}")) for number in range(arms + 1)]
    wide, long = (overview(some[:cells], with_intervals=True) for cells in (arms, arms + 1))
    assert (len(wide.columns), len(wide.lines)) == (arms, arms)
    assert (len(long.columns), len(long.lines)) == (arms, arms + 1)
    # The same figures, the other way about; places are named as far as they differ.
    assert [line[0] for line in long.lines] == [*wide.columns, str(arms)]
    assert wide.lines[0][1] == long.lines[0][1]
    assert "(" not in overview(some, with_intervals=False).lines[0][1]


def said(record: Record, **fields: object) -> list[str]:
    """What is doubted of an arm."""
    found = replace(shown(record), **fields)
    return list(doubts(record, found, shown(PLAIN)))


def test_speeds_that_cannot_be_are_flagged() -> None:
    own = drafting()
    assert said(own) == []
    # Twice the tokens a pass, and four times as fast.
    (doubt,) = said(own, decoding_against={"plain": Estimate(4.0, 3.5, 4.5)})
    assert "cannot be" in doubt
    assert "2.00 times its tokens a pass" in doubt
    # As fast as it may be, and nearly so where the interval is wide.
    assert said(own, decoding_against={"plain": Estimate(2.1, 1.9, 4.5)}) == []


def test_an_efficiency_that_cannot_be_is_flagged() -> None:
    costs = PassCosts(known(0.1), known(0.6), {4: known(1.8)}, {4: known(1.5)}, known(0.05))
    (doubt,) = said(drafting(costs=costs))
    assert "efficiency" in doubt


def test_a_single_repeat_and_a_busy_machine_are_said() -> None:
    once = [replace(each, seconds=each.seconds[:1]) for each in (STOCK, PLAIN)]
    assert any("timed once" in each for each in doubts(once[1], shown(PLAIN), None))
    busy = cell_of(STOCK, PLAIN, free=0.2)
    (doubt,) = busy.doubts
    assert "of 2 cores 0.2 were free for 1 thread," in doubt
    assert "0.2 were free" in page([busy]).markdown
    assert cell_of(STOCK, PLAIN, free=1.9).doubts == []


def test_what_was_not_timed_has_counts_alone() -> None:
    measured = cell_of(drafting(), settings=replace(SETTINGS, repeats=0))
    (found,) = measured.figures.values()
    assert found == untimed_figures(measured.arms[0])
    assert found.decoding_tokens_per_second is None
    assert found.mean_accepted_length.value == 2.0
    text = page([measured]).markdown
    assert "tokens/s" not in text.partition("## Overview")[2]
    assert "| selfspec exit:4 | 2.00" in text
