"""Results on disk: they are read back as they were, a run goes on where it was, and what is torn does not count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from helpers import tiny
from helpers.made import record
from selfspec.errors import BenchError
from selfspec.tools.bench.arm import ArmKind, ArmSpec
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.results_file import FILE, ResultsFile
from selfspec.tools.bench.session import BenchedModel, BenchPlan, Session

SPECS = [ArmSpec(ArmKind.GENERATE), ArmSpec(ArmKind.PLAIN), ArmSpec(ArmKind.DRAFT, "lookup+exit:2")]
CELLS = {Cell("w", temperature, 1, 6, 16): [torch.arange(6)[None]] for temperature in (0.0, 0.8)}


class Watch:
    """Notes how many steps each cell was said to have, and may interrupt before one."""

    def __init__(self, interrupted_at: int = 99) -> None:
        self.cells: list[int] = []
        self.steps = 0
        self._interrupted_at = interrupted_at

    def begin(self, cell: Cell, steps: int) -> None:
        if len(self.cells) == self._interrupted_at:
            raise KeyboardInterrupt
        self.cells.append(steps)

    def step(self) -> None:
        self.steps += 1


def session(model: PreTrainedModel, folder: Path, specs: list[ArmSpec] = SPECS) -> Session:
    """One repeat; a model that no other process can load is not weighed."""
    return Session(
        BenchedModel("tiny", None, model), specs, BenchPlan(repeats=1, warm_up=1, costs=False), ResultsFile(folder)
    )


def test_results_are_read_back_as_they_were(llama: PreTrainedModel, tmp_path: Path) -> None:
    measured = session(llama, tmp_path).measure(CELLS, Watch())
    assert ResultsFile(tmp_path).cells() == measured
    assert len((tmp_path / FILE).read_text().splitlines()) == len(CELLS) * len(SPECS)
    assert all(record.rounds for each in measured for record in each.arms[1:])
    # Also in the order in which sums over them are taken.
    read = [list(record.rounds) for each in ResultsFile(tmp_path).cells() for record in each.arms]
    assert read == [list(record.rounds) for each in measured for record in each.arms]


def test_a_cell_is_not_run_again(llama: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        session(llama, tmp_path).measure(CELLS, Watch(interrupted_at=1))
    watch = Watch()
    measured = session(llama, tmp_path).measure(CELLS, watch)
    assert (watch.cells[0], watch.cells[1] > 0) == (0, True)
    assert [each.cell for each in measured] == list(CELLS)
    again = Watch()
    assert session(llama, tmp_path, SPECS[:2]).measure(CELLS, again) == measured
    assert again.cells == [0, 0]


def test_another_arm_or_model_is_measured_with_all_the_others(llama: PreTrainedModel, tmp_path: Path) -> None:
    session(llama, tmp_path).measure(CELLS, Watch())
    watch = Watch()
    measured = session(llama, tmp_path, [*SPECS, ArmSpec(ArmKind.DRAFT, "exit:1")]).measure(CELLS, watch)
    assert all(watch.cells)
    assert [len(each.arms) for each in measured] == [4, 4]
    # The report shows each cell as its latest run did.
    assert ResultsFile(tmp_path).cells() == measured
    session(tiny.llama(dtype=torch.float32), tmp_path).measure(CELLS, watch)
    assert len(ResultsFile(tmp_path).cells()) == 4


def test_a_line_that_was_cut_off_does_not_count(llama: PreTrainedModel, tmp_path: Path) -> None:
    measured = session(llama, tmp_path).measure(CELLS, Watch())
    file = tmp_path / FILE
    file.write_text(file.read_text()[:-40])
    assert len(ResultsFile(tmp_path).cells()[1].arms) == len(SPECS) - 1
    watch = Watch()
    again = session(llama, tmp_path).measure(CELLS, watch)
    assert (watch.cells[0], watch.cells[1] > 0) == (0, True)
    assert again[0] == measured[0]
    assert ResultsFile(tmp_path).cells() == again


def test_foreign_lines_are_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"arm": 1}\n')
    with pytest.raises(BenchError, match="line 1 of"):
        ResultsFile(tmp_path).cells()


def test_an_absent_arm_is_kept(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path)
    file.add([record(ArmKind.GENERATE, [[1.0]]), record(ArmKind.STATIC, [], absence="no compiler")])
    (cell,) = file.cells()
    assert [(arm.absence, arm.scored) for arm in cell.arms] == [(None, True), ("no compiler", False)]
