"""The file of runs: what is asked twice is done once, what is torn does not count, and an error is a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from helpers import tiny
from helpers.studies import GREEDY, profile_of
from selfspec.accept import TokenLevel
from selfspec.draft import Assistant, ExitHead
from selfspec.errors import BenchError, StorageError, StudyError
from selfspec.measure.spare_cores import SpareCores
from selfspec.model.early_head import DraftHead
from selfspec.tools.lab.drafts import Given, content
from selfspec.tools.lab.runs import FILE, Asked, Origin, Run, Runs, told_apart

ASKED = [Asked("estimate", {"draft": f"exit:{number}"}, {"text": "w"}) for number in range(4)]


def found(asked: Sequence[Asked]) -> list[Mapping[str, Any]]:
    return [{"value": each.under["draft"]} for each in asked]


def test_what_is_kept_is_read_again_and_not_done_again(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.find_out(ASKED[:2], found, {"torch": "2"})
    again = Runs(tmp_path)
    assert [run.found["value"] for run in again.of_kind("estimate")] == ["exit:0", "exit:1"]
    assert again[ASKED[0]] == runs[ASKED[0]]
    done: list[Asked] = []

    def counted(asked: Sequence[Asked]) -> list[Mapping[str, Any]]:
        done.extend(asked)
        return found(asked)

    again.find_out(ASKED, counted, {})
    assert done == ASKED[2:]
    assert len((tmp_path / FILE).read_text().splitlines()) == 4


def test_of_one_thing_the_latest_counts_where_the_first_was(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.keep([Run(ASKED[0], {"value": 1}), Run(ASKED[1], {"value": 2}), Run(ASKED[0], {"value": 3})])
    for each in (runs, Runs(tmp_path)):
        assert [run.found["value"] for run in each.of_kind("estimate")] == [3, 2]


def test_what_things_are_called_does_not_change_them() -> None:
    assert Asked("costs", {"a": 1}, {"model": "x"}).key == Asked("costs", {"a": 1}).key
    assert len({Asked("costs", {"a": 1}).key, Asked("texts", {"a": 1}).key, Asked("costs", {"a": 2}).key}) == 3


def test_an_error_of_one_is_its_result_and_leaves_the_others(tmp_path: Path) -> None:
    def fails(asked: Sequence[Asked]) -> list[Mapping[str, Any]]:
        if ASKED[1] in asked:
            raise ZeroDivisionError("of all things")
        return found(asked)

    runs = Runs(tmp_path)
    runs.find_out(ASKED[:3], fails, {})
    assert [runs[each].error is None for each in ASKED[:3]] == [True, False, True]
    error = runs[ASKED[1]].error
    assert error is not None
    assert error.startswith("ZeroDivisionError: of all things (test_runs.py:")


def test_an_interrupt_keeps_what_was_finished(tmp_path: Path) -> None:
    def interrupted(asked: Sequence[Asked]) -> list[Mapping[str, Any]]:
        raise KeyboardInterrupt

    runs = Runs(tmp_path)
    runs.find_out(ASKED[:1], found, {})
    with pytest.raises(KeyboardInterrupt):
        runs.find_out(ASKED[1:], interrupted, {})
    assert ASKED[0] in Runs(tmp_path)
    assert ASKED[1] not in Runs(tmp_path)


def test_a_line_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.find_out(ASKED[:2], found, {})
    file = tmp_path / FILE
    file.write_text(file.read_text()[:-20])
    again = Runs(tmp_path)
    assert ASKED[1] not in again
    again.find_out(ASKED[1:2], found, {})
    assert len(file.read_text().splitlines()) == 2
    assert ASKED[1] in Runs(tmp_path)


def test_foreign_lines_are_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"arm": 1}\n')
    with pytest.raises(BenchError, match=r"line 1 of .* is no run"):
        Runs(tmp_path)


def test_a_place_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        Runs(tmp_path / "file")
    runs = Runs(tmp_path / "folder")
    (tmp_path / "folder").write_text("")
    with pytest.raises(StorageError, match="what was measured before is kept"):
        runs.find_out(ASKED[:1], found, {})


def test_times_beside_other_work_are_doubted(tmp_path: Path) -> None:
    around = {"device": "cpu", "threads": 2}
    Runs(tmp_path).keep([Run(ASKED[0], {"value": 1}, environment=around, load=SpareCores(2, 0.6))])
    doubt = Runs(tmp_path)[ASKED[0]].doubt
    assert doubt is not None
    assert "of 2 cores 0.6 were free for 2 threads" in doubt
    for run in (
        Run(ASKED[0], {}, environment=around, load=SpareCores(2, 1.8)),
        Run(ASKED[0], {}, environment=around),
        Run(ASKED[0], {}, environment={**around, "device": "gpu"}, load=SpareCores(2, 0.6)),
    ):
        assert run.doubt is None


CHANGES: dict[str, Callable[[PreTrainedModel], object]] = {
    "tuned": lambda model: model.model.layers[2].mlp.up_proj.weight.data[3].mul_(1.1),
    "rounded": lambda model: model.to(torch.bfloat16).to(torch.float64),
    "in float32": lambda model: model.float(),
    "configured": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    "ending": lambda model: setattr(model.generation_config, "eos_token_id", [3, 4]),
    "eager": lambda model: model.set_attn_implementation("eager"),
    "on more threads": lambda _: torch.set_num_threads(torch.get_num_threads() + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_figures_depend_on_makes_another(change: str) -> None:
    # Its weights are values of float32.
    model, threads = tiny.llama().float().double(), torch.get_num_threads()
    before = Origin.of(model)
    try:
        CHANGES[change](model)
        after = Origin.of(model)
    finally:
        torch.set_num_threads(threads)
    assert after.setting != before.setting
    assert (after.base == before.base) == (change not in ("tuned", "rounded"))


def test_where_a_model_lies_makes_none(tmp_path: Path) -> None:
    model = tiny.llama()
    before = Origin.of(model)
    model.save_pretrained(tmp_path / "model")
    model.generate(tiny.prompt(4), max_new_tokens=2, do_sample=False)
    assert Origin.of(model) == before
    assert Origin.of(type(model).from_pretrained(tmp_path / "model", dtype=model.dtype)) == before


def test_weights_that_are_not_there_belong_to_nothing() -> None:
    with pytest.raises(BenchError, match="not in memory: load the model whole"):
        Origin.of(tiny.llama().to("meta"))


def test_models_of_one_name_are_called_by_their_weights() -> None:
    assert told_apart([("a", "1" * 20), ("b", "2" * 20), ("a", "3" * 20), ("a", "1" * 20)]) == {
        ("a", "1" * 20): "a 11111111",
        ("b", "2" * 20): "b",
        ("a", "3" * 20): "a 33333333",
    }


class Mild(TokenLevel):
    """A rule with a setting, which its name does not say."""

    def __init__(self, by: float) -> None:
        self.by = by


def _head(by: float) -> ExitHead:
    adapter = nn.Linear(2, 2)
    nn.init.constant_(adapter.weight, by)
    nn.init.zeros_(adapter.bias)
    return ExitHead(2, DraftHead(adapter, torch.tensor([1, 2, round(10 * by)])), "base")


@pytest.mark.parametrize(
    "made",
    [
        lambda by: Assistant(tiny.llama(seed=round(10 * by))),
        _head,
        Mild,
        lambda by: profile_of(tiny.llama(), replace(GREEDY, speedup=(by, by, by))),
    ],
)
def test_drafts_and_rules_of_one_name_are_told_apart(made: Callable[[float], Any]) -> None:
    assert content(made(0.5)) == content(made(0.5)) != content(made(0.7))


def test_two_of_one_name_are_not_studied_at_once() -> None:
    drafts = [Assistant(tiny.llama(seed=seed)) for seed in range(2)]
    with pytest.raises(StudyError, match="2 of what is given are called Assistant"):
        Given.of(drafts)
