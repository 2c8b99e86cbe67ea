"""Pictures of a benchmark: at most a page, on shared axes, and never empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from helpers.made import CELL, SETTINGS, plain, record
from selfspec.decode.stats import Stats
from selfspec.measure.palette import GREY
from selfspec.tools.bench import plots
from selfspec.tools.bench.plots import ACCEPTANCE, SPEED, draw, mark_of_arm
from selfspec.tools.bench.results import MeasuredCell

pytest.importorskip("matplotlib")

DRAFTS = ["exit:2", "exit:4", "lookup", "lookup+exit:4", "int8", "auto"]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that are drawn, by the name of their file."""
    figures: dict[str, Figure] = {}
    save = Figure.savefig

    def keep(figure: Figure, file: Path, **how: Any) -> None:
        figures[SPEED if SPEED.removesuffix(".png") in str(file) else ACCEPTANCE] = figure
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


def test_without_drafts_there_is_no_acceptance_to_draw(tmp_path: Path) -> None:
    (tmp_path / ACCEPTANCE).write_text("of an earlier run")
    assert draw(cells(1, []), tmp_path) == [SPEED]
    assert not (tmp_path / ACCEPTANCE).exists()


def test_arms_that_are_not_selfspecs_are_grey() -> None:
    arms = [measured.arm for measured in cells(1, ["exit:2"])[0].arms]
    assert [mark_of_arm(arm).colour for arm in arms] == [GREY, "#000000", "#0072B2"]
