"""What commands say of their work: verdicts claim only what was measured; without a terminal lines tell progress."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from selfspec.cli import terminal
from selfspec.cli.search import verdict as verdict_of_search
from selfspec.cli.terminal import StepBar, counting_bar, progress_bar
from selfspec.measure.estimate import Estimate
from selfspec.tools.lab.study_report import TextFindings
from selfspec.tools.train.run import CheckedExit, doubts, verdict


def estimate(value: float) -> Estimate:
    return Estimate(value, value - 0.1, value + 0.1, 0.9)


@pytest.mark.parametrize(
    ("greedy", "sampled", "said"),
    [(1.4, 1.2, "exit:4 in times plain decoding: greedy 1.40"), (0.9, 0.8, "No exit surely beat plain decoding here")],
)
def test_of_a_training(greedy: float, sampled: float, said: str) -> None:
    checked = [
        CheckedExit("exit:2", 1.3, estimate(0.5), estimate(0.5)),
        CheckedExit("exit:4", 1.5, estimate(greedy), estimate(sampled)),
    ]
    found = verdict(checked, Path("FASTER"), {"held_out_loss": 2.0}, {"held_out_loss": 2.1})
    assert found.startswith(said)
    assert "predicted 1.50" in found
    assert "lost 0.10 nats a token" in found
    one_turn = replace(checked[1], sampled=Estimate(1.05, 1.05, 1.05))
    assert verdict([replace(one_turn, greedy=estimate(0.9))], Path("FASTER"), {}, {}).startswith("No exit surely")
    ruined = verdict(checked, Path("FASTER"), {"held_out_loss": 4.2}, {"held_out_loss": 5.7})
    assert ruined.startswith("The training ruined the full model: its loss on held-out text is 5.70, 1.50 nats a token")
    assert "exit:4" not in ruined


def test_of_heads_none_of_which_pays() -> None:
    checked = [CheckedExit("head:HEADS@4", 0.95, estimate(0.8), estimate(0.9))]
    found = verdict(checked, Path("HEADS"), {"alpha_4": 0.1}, {"alpha_4": 0.2})
    assert found.startswith("No exit surely beat plain decoding here; the best is head:HEADS@4")


def test_what_looks_wrong_in_a_training_is_said() -> None:
    before = {"held_out_loss": 4.2}
    fine = [{"loss": 5.0, "grad_norm": 9.0}, {"held_out_loss": 4.25}, {"loss": 4.6, "grad_norm": 4.0}]
    assert doubts(before, fine) == []
    wrong = [*fine, {"loss": 6.1, "grad_norm": 187.0}, {"held_out_loss": 5.7}]
    rose, steep, forgets = doubts(before, wrong)
    assert "rose from 4.60 to 6.10" in rose
    assert "reached 187" in steep
    assert "rose from 4.20 to 5.70" in forgets


ROW = {
    "draft": "exit:2",
    "draft_length": 2,
    "best_length": True,
    "alpha": 0.5,
    "predicted_speedup": 1.3,
    "predicted_speedup_low": 1.2,
    "predicted_speedup_high": 1.4,
}
CONFIRMED = {**ROW, "acceptance_rate": 0.5, "measured_acceptance_rate": 0.5}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            CONFIRMED | {"measured_speedup_median": 1.2},
            "generation: measured 1.20 and predicted 1.30 (",
        ),
        (CONFIRMED | {"measured_speedup_median": 0.9}, "no draft beat plain decoding here; exit:2 with 2 draft tokens"),
        (ROW, "exit:2 with 2 draft tokens is predicted 1.30 (1.20-1.40) times plain"),
        (ROW | {"predicted_speedup": 0.9}, "no draft is predicted to beat plain decoding"),
    ],
)
def test_of_a_study(row: dict[str, object], said: str) -> None:
    assert said in TextFindings("texts", [row], [], {}).sentence()


def test_of_a_search_that_found_one() -> None:
    found, next_step = verdict_of_search("demo", "skip:layers=3", 1.24, 12, Path("skip.json"))
    assert found == "12 sets evaluated; skip:layers=3 is predicted 1.24 times plain decoding. It is in skip.json."
    assert next_step == "Measure it before you rely on it: selfspec bench demo --draft skip-file:skip.json"


@pytest.mark.parametrize(("promised", "shown"), [(0.97, "0.97"), (1.0, "1.00")])
def test_of_a_search_in_which_all_sets_lose(promised: float, shown: str) -> None:
    found, next_step = verdict_of_search("demo", "skip:layers=3", promised, 1, Path("skip.json"))
    assert found.startswith("No skip set is predicted to beat plain decoding here; of 1 set evaluated skip:layers=3")
    assert f"predicted {shown} times plain decoding" in found
    assert "best" not in found
    assert "selfspec calibrate demo" in next_step
    assert "skip-file" not in next_step


def test_a_study_says_which_speeds_cannot_be() -> None:
    speed = {f"measured_speedup{end}": value for end, value in (("", 1.5), ("_low", 1.4), ("_high", 1.6))}
    row = {**CONFIRMED, **speed, "measured_mean_accepted_length": 1.19}
    one, wrong = TextFindings("texts", [row], [["a"]], {}).doubts
    assert "one text" in one
    assert "1.50 times plain decoding with 1.19 times its tokens a pass cannot be" in wrong
    assert TextFindings("texts", [{**row, "measured_mean_accepted_length": 2.0}], [["a"], ["b"]], {}).doubts == []


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_EVERY", 0.05)


@pytest.mark.usefixtures("often")
def test_a_step_that_takes_long_is_said_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("measuring") as progress:
        bar = StepBar(progress)
        bar.begin(4)
        bar.step("cell 1 of 2")
        bar.step("cell 2 of 2: [all]")
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 7
    assert lines[-1].startswith("measuring: 1 of 4, cell 2 of 2: [all]; ")
    assert "left" in lines[-1]


@pytest.mark.usefixtures("often")
def test_a_count_is_said_and_nothing_after_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with counting_bar("rounding") as count:
        count(3, 12)
        time.sleep(0.12)
    said = capsys.readouterr().err
    assert "rounding: 3 of 12" in said
    time.sleep(0.12)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("often")
def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("measuring") as progress:
        StepBar(progress).begin(1)
    assert capsys.readouterr().err == ""
