"""What is made of raw times: parts of a round, figures worked out by hand, tables, and plots of a page at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from helpers.studies import CELL, SETTINGS, cell_of, known, plain, record
from selfspec.decode.output import Stats
from selfspec.measure.embedded import checkpoint_folder
from selfspec.measure.estimate import Estimate
from selfspec.tools.lab import bench_report, report
from selfspec.tools.lab.arms import ArmSpec, Cell, Prompts, make_arm
from selfspec.tools.lab.bench_report import draw, mark_of_arm, overview, page
from selfspec.tools.lab.measured import MeasuredCell, calls_without_cycles, doubts, figures, untimed_figures
from selfspec.tools.lab.pass_costs import PassCosts, PeakMemory, costs_of, measure_memory
from selfspec.tools.lab.record import Record, ShapeCount
from selfspec.tools.lab.report import GREY
from selfspec.tools.lab.turns import TextAgreement

WEIGHED = Cell("w", 0.0, 2, 8, 16)
STOCK = record("generate", [[1.1, 2.1], [2.1, 4.1]], cycle_share=[[0.0, 0.5], [0.1, 0.5]])
PLAIN = plain([[1.7, 1.7], [1.7, 1.7]])


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
    return figures(record, STOCK, PLAIN)


def test_speeds() -> None:
    found = shown(STOCK)
    assert (found.decoding_tokens_per_second.low, found.decoding_tokens_per_second.high) == pytest.approx((5.0, 10.0))
    assert found.whole_call_tokens_per_second.high == pytest.approx(32 / 3.2)
    assert found.first_token_seconds.value == pytest.approx(0.1)
    # Ratios are taken repeat by repeat.
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


def test_acceptance() -> None:
    assert shown(STOCK).mean_accepted_length.value == 1.0
    assert shown(drafting()).mean_accepted_length.value == 2.0
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
    for untimed in (None, PassCosts(known(0.1), None)):
        assert shown(drafting(costs=untimed)).prediction is None


def cell(**fields: object) -> MeasuredCell:
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


DEEP = Stats(
    8, 8, 8, judged_per_depth=[100, 60, 30], accepted_per_depth=[60, 30, 10], seconds={"draft": 0.5, "verify": 1.0}
)
DRAFTS = ["exit:2", "exit:4", "lookup", "lookup+exit:4", "int8", "auto"]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, coarsely: the speeds come first."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, file: Path, **how: Any) -> None:
        if file.suffix == ".png":
            figures.append(figure)
        save(figure, file, **how)

    monkeypatch.setattr(report, "_DPI", 40)
    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def cells(workloads: int, drafts: Sequence[str], judged: int = 100) -> list[MeasuredCell]:
    found = []
    for number in range(workloads):
        for temperature in (0.0, 0.8):
            times = [[1.0, 1.2], [1.1, 1.0]]
            phases = {"draft": 0.5, "verify": 1.0}
            counts = Stats(8, 8, 8, judged_per_depth=[judged], accepted_per_depth=[judged // 2], seconds=phases)
            arms = [record("generate", times), plain(times)]
            arms += [record("draft", times, draft, counts=counts) for draft in drafts]
            found.append(cell_of(*arms, cell=replace(CELL, workload=f"w{number}", temperature=temperature)))
    return found


@pytest.mark.parametrize(("workloads", "drafts"), [(1, DRAFTS), (2, DRAFTS[:1]), (24, DRAFTS)])
def test_every_picture_is_at_most_a_page(
    workloads: int, drafts: list[str], saved: list[Figure], tmp_path: Path
) -> None:
    assert [file.name for file in draw(cells(workloads, drafts), tmp_path)] == ["speed.png", "acceptance.png"]
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{name}.{kind}" for name in ("speed", "acceptance") for kind in ("png", "svg")
    }
    for figure in saved:
        width, height = figure.get_size_inches()
        assert width <= 7.5
        assert height <= 9.5
        assert len({(axes.get_xlim(), axes.get_ylim()) for axes in figure.axes if axes.get_title()}) == 1


def test_a_panel_without_enough_tokens_says_so(saved: list[Figure], tmp_path: Path) -> None:
    draw(cells(1, DRAFTS, judged=bench_report._ENOUGH - 1), tmp_path)
    texts = [text.get_text() for axes in saved[1].axes for text in axes.texts]
    assert texts == ["too few tokens"] * 2
    # Without drafts there is no acceptance to draw.
    assert [file.name for file in draw(cells(1, []), tmp_path)] == ["speed.png"]


def test_nothing_lies_outside_the_picture(saved: list[Figure], tmp_path: Path) -> None:
    slow = cells(1, ["exit:2", "lookup"])
    # Sampled cells, which are drawn last, are four times as fast beside model.generate.
    fast = [
        replace(each, arms=(record("generate", [[4.0, 4.8], [4.4, 4.0]]), *each.arms[1:]))
        if each.cell.temperature
        else each
        for each in slow
    ]
    draw(fast, tmp_path)
    for axes in (axes for figure in saved for axes in figure.axes):
        (left, right), (low, high) = axes.get_xlim(), sorted(axes.get_ylim())
        for line in axes.get_lines():
            if line.get_linestyle() == "None":
                across, up = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
                assert left <= across.min() <= across.max() <= right
                assert low <= up.min() <= up.max() <= high


def test_every_depth_that_is_drawn_has_a_tick(saved: list[Figure], tmp_path: Path) -> None:
    deep = [
        replace(each, arms=tuple(replace(arm, counts=DEEP if arm.arm.draft else arm.counts) for arm in each.arms))
        for each in cells(1, ["exit:2", "exit:4"])
    ]
    draw(deep, tmp_path)
    for axes in saved[1].axes:
        (left, right), ticks = axes.get_xlim(), axes.get_xticks().tolist()
        assert [tick for tick in ticks if left <= tick <= right] == [1, 2, 3]


def test_arms_that_are_not_selfspecs_are_grey() -> None:
    arms = [measured.arm for measured in cells(1, ["exit:2"])[0].arms]
    assert [mark_of_arm(arm).colour for arm in arms] == [GREY, "#000000", "#0072B2"]


@pytest.mark.tools
def test_every_arm_that_drafts_has_costs(llama: PreTrainedModel) -> None:
    drafts = ("exit:2", "lookup", "lookup+exit:2")
    specs = [ArmSpec("generate"), ArmSpec("plain"), *(ArmSpec("draft", draft) for draft in drafts)]
    specs.append(ArmSpec("draft", "exit:2", nodes=8))
    prompts = [Prompts.of_one_length(torch.arange(12).view(2, 6))]
    found: Any = costs_of(llama, Cell("w", 0.0, 2, 6, 16), [make_arm(spec, llama) for spec in specs], prompts)
    stock, plain, leaving, looking_up, both, tree = found
    assert stock is plain is tree is None
    assert leaving == both
    assert leaving.draft.value > 0
    assert looking_up.draft is None
    assert looking_up.of_round(3, 3) is None
    for costs, steps in ((leaving, 3), (looking_up, 0)):
        cost = costs.of_round(steps, 3)
        assert 0 < cost.low <= cost.value <= cost.high
    assert looking_up.from_tokens.keys() == {1, 2, 3, 4, 6, 8}
    assert leaving.verify.keys() == {2, 3, 4, 6, 8}


def test_costs_lie_on_lines_between_those_timed() -> None:
    resumed = {width: known(value) for width, value in {2: 1.0, 4: 1.2, 8: 2.0}.items()}
    costs: Any = PassCosts(known(0.1), Estimate(0.2, 0.1, 0.4), resumed, {1: known(1.0), 4: known(1.6)})
    assert costs.of_round(0, 0).value == 1.0
    assert costs.of_round(2, 2).value == pytest.approx(0.4 + 1.1)
    assert costs.of_round(5, 5).value == pytest.approx(1.0 + 1.6)
    assert costs.of_round(0, 2).value == pytest.approx(1.4)
    # Beyond them all is as at the nearest.
    assert costs.of_round(0, 9).value == 1.6
    found = costs.of_round(2, 2)
    assert (found.low, found.high) == pytest.approx((0.2 + 1.1, 0.8 + 1.1))


@pytest.mark.tools
def test_a_process_of_its_own_weighs_an_arm() -> None:
    prompts = Prompts.of_one_length(torch.arange(10, 26).view(2, 8))
    arm = ArmSpec("draft", "exit:4")
    found = measure_memory(arm, WEIGHED, prompts, str(checkpoint_folder()), torch.float32)
    if found is None:
        pytest.skip("this system does not tell")
    # 9.9M weights in float32, and not much more than what a library or two takes.
    assert 0.8 * 39e6 < found.weights < 39e6 + 60e6
    assert found.peak >= found.weights
    assert found.growth < 60e6
    assert found.counted_by == "system"


@pytest.mark.tools
def test_a_process_that_fails_says_so() -> None:
    prompts = Prompts.of_one_length(torch.tensor([[1, 2]]))
    with pytest.raises(RuntimeError, match=r"memory of selfspec plain could not be measured: .*nowhere"):
        measure_memory(ArmSpec("plain"), WEIGHED, prompts, "./nowhere", torch.float32)
