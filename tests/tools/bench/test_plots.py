"""Pictures of a benchmark: at most a page, on shared axes, and never empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from helpers.made import CELL, SETTINGS, plain, record
from selfspec.decode.stats import Stats
from selfspec.measure.palette import GREY
from selfspec.tools.bench import plots
from selfspec.tools.bench.plots import ACCEPTANCE, SPEED, draw, mark_of_arm
from selfspec.tools.bench.results import MeasuredCell

pytest.importorskip("matplotlib")

DEEP = Stats(
    8, 8, 8, judged_per_depth=[100, 60, 30], accepted_per_depth=[60, 30, 10], seconds={"draft": 0.5, "verify": 1.0}
)
DRAFTS = ["exit:2", "exit:4", "lookup", "lookup+exit:4", "int8", "auto"]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that are drawn, by the name of their file: the speeds come first."""
    figures: dict[str, Figure] = {}
    save = Figure.savefig

    def keep(figure: Figure, file: Path, **how: Any) -> None:
        figures[ACCEPTANCE if SPEED in figures else SPEED] = figure
        save(figure, file, **{**how, "dpi": 40})

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def cells(workloads: int, drafts: Sequence[str], judged: int = 100) -> list[MeasuredCell]:
    """Greedy and sampled cells of several workloads."""
    found = []
    for number in range(workloads):
        for temperature in (0.0, 0.8):
            cell = replace(CELL, workload=f"w{number}", temperature=temperature)
            times = [[1.0, 1.2], [1.1, 1.0]]
            arms = [record("generate", times), plain(times)]
            phases = {"draft": 0.5, "verify": 1.0}
            counts = Stats(8, 8, 8, judged_per_depth=[judged], accepted_per_depth=[judged // 2], seconds=phases)
            arms += [record("draft", times, draft, counts=counts) for draft in drafts]
            found.append(MeasuredCell(cell, SETTINGS, tuple(replace(arm, cell=cell) for arm in arms)))
    return found


@pytest.mark.parametrize(("workloads", "drafts"), [(1, DRAFTS), (2, DRAFTS[:1]), (9, DRAFTS[:2]), (24, DRAFTS)])
def test_every_picture_is_at_most_a_page(
    workloads: int, drafts: list[str], saved: dict[str, Figure], tmp_path: Path
) -> None:
    assert draw(cells(workloads, drafts), tmp_path) == [SPEED, ACCEPTANCE]
    for figure in saved.values():
        width, height = figure.get_size_inches()
        assert (width, height) <= (7.5, 9.5)
        assert height <= 9.5
        limits = {(axes.get_xlim(), axes.get_ylim()) for axes in figure.axes if axes.get_title()}
        assert len(limits) == 1


def test_a_panel_without_enough_tokens_says_so(saved: dict[str, Figure], tmp_path: Path) -> None:
    draw(cells(1, DRAFTS, judged=plots._ENOUGH - 1), tmp_path)
    texts = [text.get_text() for axes in saved[ACCEPTANCE].axes for text in axes.texts]
    assert texts == ["too few tokens"] * 2


def test_a_line_without_enough_tokens_says_so(saved: dict[str, Figure], tmp_path: Path) -> None:
    many = cells(5, ["exit:2"])
    short = [cell for cell in cells(5, ["exit:2"], judged=1) if cell.cell.workload == "w3"]
    draw([*[cell for cell in many if cell.cell.workload != "w3"], *short], tmp_path)
    texts = [text.get_text() for axes in saved[ACCEPTANCE].axes for text in axes.texts]
    assert texts == ["too few tokens"] * 2


@pytest.mark.parametrize("workloads", [1, 3])
def test_nothing_lies_outside_the_picture(workloads: int, saved: dict[str, Figure], tmp_path: Path) -> None:
    slow = cells(workloads, ["exit:2", "lookup"])
    # Sampled cells, which are drawn last, are four times as fast beside model.generate.
    fast = [
        replace(each, arms=(record("generate", [[4.0, 4.8], [4.4, 4.0]]), *each.arms[1:]))
        if each.cell.temperature
        else each
        for each in slow
    ]
    draw(fast, tmp_path)
    for figure in saved.values():
        figure.draw_without_rendering()
        for axes in figure.axes:
            (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
            for line in axes.get_lines():
                across, up = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
                if line.get_linestyle() == "None":
                    assert (across >= left).all()
                    assert (across <= right).all()
                    assert (up >= min(low, high)).all()
                    assert (up <= max(low, high)).all()
            label = axes.yaxis.label.get_window_extent()
            assert label.y0 >= 0
            assert label.y1 <= figure.bbox.y1


def test_every_depth_that_is_drawn_has_a_tick(saved: dict[str, Figure], tmp_path: Path) -> None:
    deep = [
        replace(each, arms=tuple(replace(arm, counts=DEEP if arm.arm.draft else arm.counts) for arm in each.arms))
        for each in cells(1, ["exit:2", "exit:4"])
    ]
    draw(deep, tmp_path)
    for axes in saved[ACCEPTANCE].axes:
        (left, right), ticks = axes.get_xlim(), axes.get_xticks().tolist()
        assert [tick for tick in ticks if left <= tick <= right] == [1, 2, 3]


def test_without_drafts_there_is_no_acceptance_to_draw(tmp_path: Path) -> None:
    (tmp_path / ACCEPTANCE).write_text("of an earlier run")
    assert draw(cells(1, []), tmp_path) == [SPEED]
    assert not (tmp_path / ACCEPTANCE).exists()


def test_arms_that_are_not_selfspecs_are_grey() -> None:
    arms = [measured.arm for measured in cells(1, ["exit:2"])[0].arms]
    assert [mark_of_arm(arm).colour for arm in arms] == [GREY, "#000000", "#0072B2"]
