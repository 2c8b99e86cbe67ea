"""Cells that are measured once: a run goes on where it was, and is read back as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from helpers import tiny
from helpers.studies import cell_of, record
from selfspec.draft.suffixes import write_corpus
from selfspec.errors import BenchError
from selfspec.measure.estimate import Estimate
from selfspec.model.identity import Vocabulary
from selfspec.runtime import RuntimeName
from selfspec.tools.lab.arms import ArmSpec, Cell, Prompts
from selfspec.tools.lab.bench_report import by_prompt
from selfspec.tools.lab.measured import KIND, MeasuredCell
from selfspec.tools.lab.pass_costs import PassCosts, PeakMemory
from selfspec.tools.lab.runs import Asked, Run, Runs
from selfspec.tools.lab.session import Part, Session
from selfspec.tools.lab.turns import TextAgreement

SPECS = [ArmSpec("generate"), ArmSpec("plain"), ArmSpec("draft", "lookup+exit:2")]
CELLS = {Cell("w", temperature, 1, 6, 16): [Prompts.of_one_length(torch.arange(6)[None])] for temperature in (0.0, 0.8)}
# Every arm warms up once and is timed once, on one batch.
STEPS = 2
SPEED: frozenset[Part] = frozenset({"speed"})


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
    model: PreTrainedModel,
    folder: Path,
    watch: Notes | None = None,
    specs: list[ArmSpec] = SPECS,
    parts: frozenset[Part] = SPEED,
) -> list[MeasuredCell]:
    """One repeat; a model that no other process can load is not weighed."""
    session = Session(name="tiny", place=None, model=model, specs=specs, repeats=1, warm_up=1, parts=parts)
    return session.measure(CELLS, Runs(folder), watch or Notes())


def kept(folder: Path) -> list[MeasuredCell]:
    return [MeasuredCell.of(each) for each in Runs(folder).of_kind(KIND)]


def test_cells_are_read_back_as_they_were(llama: PreTrainedModel, tmp_path: Path) -> None:
    measured = run(llama, tmp_path)
    assert kept(tmp_path) == measured
    assert all(record.rounds for each in measured for record in each.arms[1:])
    assert measured[0].load.cores >= 1


def test_whatever_may_be_kept_is_read_back(tmp_path: Path) -> None:
    some = Estimate(0.2, 0.1, 0.3, 0.9)
    costs = PassCosts(some, some, {2: some, 4: some}, {1: some, 4: some}, some)
    specs = [ArmSpec("draft", "exit:1", 4, 8, "token", runtime=name) for name in RuntimeName]
    assert len({spec.name for spec in specs}) == len(specs)
    full = replace(
        record("draft", [[1.0]]),
        agreement=TextAgreement(2, 1, 0.5, 0.25),
        memory=PeakMemory(1, 2, "system"),
        costs=costs,
        nats=[[[1.5]]],
    )
    absent = replace(record("static", []), absence="no compiler")
    cell = cell_of(absent, *(replace(full, arm=spec) for spec in specs), free=0.5)
    Runs(tmp_path).keep([cell.run])
    assert kept(tmp_path) == [cell]
    assert (cell.arms[0].absence, cell.arms[0].scored) == ("no compiler", False)


def test_a_cell_of_another_version_is_refused() -> None:
    with pytest.raises(BenchError, match="no result of this version"):
        MeasuredCell.of(Run(Asked(KIND, {"cell": 1}), {"arms": []}))


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


@pytest.mark.tools
def test_another_arm_or_model_is_measured_with_all_the_others(llama: PreTrainedModel, tmp_path: Path) -> None:
    run(llama, tmp_path)
    measured = run(llama, tmp_path, specs=[*SPECS, ArmSpec("draft", "exit:1")])
    assert [len(each.arms) for each in measured] == [4, 4]
    # Of each cell the latest run counts.
    assert kept(tmp_path) == measured
    run(tiny.llama(dtype=torch.float32), tmp_path)
    assert len(kept(tmp_path)) == 4


def test_texts_and_counts_of_each_prompt_are_rows(llama: PreTrainedModel, tmp_path: Path) -> None:
    measured = run(llama, tmp_path)
    rows = by_prompt(measured)
    assert len(rows) == len(CELLS) * len(SPECS)
    assert all(len(row["token_ids"]) == row["new_tokens"] == 16 for row in rows)
    assert {row["call_passes"] for row in rows if row["arm"] == "selfspec plain"} == {16}
    assert all(len(row["call_judged_by_depth"]) == len(row["call_accepted_by_depth"]) for row in rows)


@pytest.mark.tools
def test_acceptance_alone_decodes_each_prompt_once(llama: PreTrainedModel, tmp_path: Path) -> None:
    watch, corpus = Notes(), tmp_path / "corpus.safetensors"
    write_corpus(corpus, [[1, 2, 3, 4]], Vocabulary.of(llama))
    drafts = [ArmSpec("draft", name, length=2) for name in ("exit:1", "int8", f"suffix:{corpus}", "recycle")]
    measured = run(llama, tmp_path, watch, drafts, frozenset({"acceptance", "quality"}))
    assert len(watch.steps) == len(drafts) * len(CELLS)
    for each in measured:
        assert not each.timed
        # Of a single prompt there are no intervals.
        (doubt,) = each.doubts
        assert doubt.startswith("all prompts had as many tokens a pass (selfspec exit:1")
        assert all(found.decoding_tokens_per_second is None for found in each.figures.values())
        assert all(found.mean_accepted_length.value >= 1 for found in each.figures.values())
        assert each.qualities.keys() == {record.arm for record in each.arms}
    # A further draft leaves those that were counted as they are; a draft that has changed is another.
    more = ArmSpec("draft", "exit:2", length=2)
    write_corpus(corpus, [[3, 4, 5]], Vocabulary.of(llama))
    watch = Notes()
    both = run(llama, tmp_path, watch, [more, *drafts[:3]], frozenset({"acceptance", "quality"}))
    assert len(watch.steps) == 2 * len(CELLS)
    assert [record.arm.draft for record in both[0].arms] == [spec.draft for spec in (more, *drafts)]
    found = {record.arm.draft: record.arm.content for record in both[0].arms}
    before = {record.arm.draft: record.arm.content for record in measured[0].arms}
    assert {draft for draft in before if found[draft] != before[draft]} == {drafts[2].draft}
    assert both[0].arms[1] == measured[0].arms[0]
    # Other figures are measured anew.
    watch = Notes()
    run(llama, tmp_path, watch, drafts, frozenset({"acceptance"}))
    assert len(watch.steps) == len(drafts) * len(CELLS)
