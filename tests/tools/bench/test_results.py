"""Results on disk: they are read back as they were, a run goes on where it was, and what is torn does not count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers import tiny
from helpers.made import record
from selfspec.errors import BenchError
from selfspec.runtime.named import RuntimeName
from selfspec.tools.bench.agreement import TextAgreement
from selfspec.tools.bench.arms import ArmSpec
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.costs import PassCosts
from selfspec.tools.bench.memory import Memory
from selfspec.tools.bench.results import FILE, MeasuredCell, ResultsFile
from selfspec.tools.bench.session import Session

SPECS = [ArmSpec("generate"), ArmSpec("plain"), ArmSpec("draft", "lookup+exit:2")]
CELLS = {Cell("w", temperature, 1, 6, 16): [torch.arange(6)[None]] for temperature in (0.0, 0.8)}
# Every arm warms up once and is timed once, on one batch.
STEPS = 2


class Notes:
    """Notes which steps there were, and may interrupt one."""

    def __init__(self, interrupted_at: int = 99) -> None:
        self.steps: list[str] = []
        self.expected = 0
        self._interrupted_at = interrupted_at

    def begin(self, steps: int) -> None:
        self.expected = steps

    def step(self, what: str) -> None:
        if len(self.steps) == self._interrupted_at:
            raise KeyboardInterrupt
        self.steps.append(what)


def run(
    model: PreTrainedModel, folder: Path, watch: Notes | None = None, specs: list[ArmSpec] = SPECS
) -> list[MeasuredCell]:
    """One repeat; a model that no other process can load is not weighed."""
    session = Session(name="tiny", place=None, model=model, specs=specs, repeats=1, warm_up=1, costs=False)
    return session.measure(CELLS, ResultsFile(folder), watch or Notes())


def test_results_are_read_back_as_they_were(llama: PreTrainedModel, tmp_path: Path) -> None:
    measured = run(llama, tmp_path)
    assert ResultsFile(tmp_path).cells() == measured
    assert len((tmp_path / FILE).read_text().splitlines()) == len(CELLS) * len(SPECS)
    assert all(record.rounds for each in measured for record in each.arms[1:])


def test_whatever_may_be_kept_is_read_back(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path)
    costs = PassCosts(0.1, 0.2, {2: 1.0, 4: 1.2}, {1: 1.0, 4: 1.6}, 0.1)
    specs = [ArmSpec("draft", "exit:1", None, 4, 8, "token", packed=True, runtime=name) for name in RuntimeName]
    assert len({spec.name for spec in specs}) == len(specs)
    about: dict[str, Any] = {
        "agreement": TextAgreement(2, 1, 0.5, 0.25),
        "memory": Memory(1, 2, "system"),
        "costs": costs,
    }
    records = [replace(record("draft", [[1.0]], **about), arm=spec) for spec in specs]
    file.add(records)
    (cell,) = file.cells()
    assert list(cell.arms) == records


def test_a_cell_is_not_run_again(llama: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(llama, tmp_path, Notes(interrupted_at=STEPS * len(SPECS)))
    watch = Notes()
    measured = run(llama, tmp_path, watch)
    assert len(watch.steps) == watch.expected == STEPS * len(SPECS)
    assert set(watch.steps) == {f"cell 1 of 1: {[*CELLS][1].title}"}
    assert [each.cell for each in measured] == list(CELLS)
    again = Notes()
    assert run(llama, tmp_path, again, SPECS[:2]) == measured
    assert (again.expected, again.steps) == (0, [])


def test_another_arm_or_model_is_measured_with_all_the_others(llama: PreTrainedModel, tmp_path: Path) -> None:
    run(llama, tmp_path)
    measured = run(llama, tmp_path, specs=[*SPECS, ArmSpec("draft", "exit:1")])
    assert [len(each.arms) for each in measured] == [4, 4]
    # The report shows each cell as its latest run did.
    assert ResultsFile(tmp_path).cells() == measured
    run(tiny.llama(dtype=torch.float32), tmp_path)
    assert len(ResultsFile(tmp_path).cells()) == 4


def test_a_line_that_was_cut_off_does_not_count(llama: PreTrainedModel, tmp_path: Path) -> None:
    measured = run(llama, tmp_path)
    file = tmp_path / FILE
    file.write_text(file.read_text()[:-40])
    assert len(ResultsFile(tmp_path).cells()[1].arms) == len(SPECS) - 1
    watch = Notes()
    again = run(llama, tmp_path, watch)
    assert len(watch.steps) == STEPS * len(SPECS)
    assert again[0] == measured[0]
    assert ResultsFile(tmp_path).cells() == again


def test_foreign_lines_are_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"arm": 1}\n')
    with pytest.raises(BenchError, match="line 1 of"):
        ResultsFile(tmp_path).cells()


def test_an_absent_arm_is_kept(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path)
    file.add([record("generate", [[1.0]]), record("static", [], absence="no compiler")])
    (cell,) = file.cells()
    assert [(arm.absence, arm.scored) for arm in cell.arms] == [(None, True), ("no compiler", False)]
