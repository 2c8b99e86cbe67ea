"""Pictures of a benchmark: at most a page, on shared axes, and never empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from helpers.studies import CELL, cell_of, plain, record
from selfspec.decode.output import Stats
from selfspec.tools.lab import bench_report, report
from selfspec.tools.lab.bench_report import draw, mark_of_arm
from selfspec.tools.lab.measured import MeasuredCell
from selfspec.tools.lab.report import GREY, mark_of

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
    """Greedy and sampled cells of several workloads."""
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
    for figure in saved:
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
        (note,) = [text for text in figure.texts if text.get_text()]
        box = note.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1


def test_every_depth_that_is_drawn_has_a_tick(saved: list[Figure], tmp_path: Path) -> None:
    deep = [
        replace(each, arms=tuple(replace(arm, counts=DEEP if arm.arm.draft else arm.counts) for arm in each.arms))
        for each in cells(1, ["exit:2", "exit:4"])
    ]
    draw(deep, tmp_path)
    for axes in saved[1].axes:
        (left, right), ticks = axes.get_xlim(), axes.get_xticks().tolist()
        assert [tick for tick in ticks if left <= tick <= right] == [1, 2, 3]


def test_without_drafts_there_is_no_acceptance_to_draw(tmp_path: Path) -> None:
    assert [file.name for file in draw(cells(1, []), tmp_path)] == ["speed.png"]


def test_arms_that_are_not_selfspecs_are_grey() -> None:
    arms = [measured.arm for measured in cells(1, ["exit:2"])[0].arms]
    assert [mark_of_arm(arm).colour for arm in arms] == [GREY, "#000000", "#0072B2"]


def test_acceptance_has_the_colours_of_its_drafts(saved: list[Figure], tmp_path: Path) -> None:
    draw(cells(1, ["exit:2", "exit:3", "int8"]), tmp_path)
    drawn = {line.get_color() for line in saved[1].axes[0].get_lines()}
    assert {mark_of("exit:2").colour, mark_of("int8").colour} <= drawn
