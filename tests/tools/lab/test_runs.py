"""The file of runs: what is asked twice is done once; what tells models and drafts apart; generations in turns."""

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
from helpers.studies import GREEDY, Notes, profile_of
from selfspec.accept import TokenLevel
from selfspec.draft import ExitHead
from selfspec.errors import BenchError, StorageError, StudyError
from selfspec.files.writing import write_sealed
from selfspec.model.early_head import DraftHead
from selfspec.tools.lab.arms import ArmSpec, Cell, Prompts, make_arm
from selfspec.tools.lab.drafts import Given, content
from selfspec.tools.lab.generations import Generations, Part, costs_of, latest, nats_of
from selfspec.tools.lab.runs import FILE, Row, Run, Runs, origin
from selfspec.tools.lab.table import summarise

RUNS = [Run("costs", {"draft": f"exit:{number}"}, {"model": "m"}) for number in range(4)]


def find(runs: Sequence[Run]) -> list[list[Mapping[str, Any]]]:
    return [[{"value": run.under["draft"]}, {"value": 2}] for run in runs]


def test_what_is_kept_is_read_again_and_not_done_again(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.find_out(RUNS[:2], find, {"torch": "2"})
    again = Runs(tmp_path)
    assert [row["value"] for row in again.measured("costs")] == ["exit:0", 2, "exit:1", 2]
    assert again[RUNS[0]] == runs[RUNS[0]]
    assert again[RUNS[0]][0].items() >= {"torch": "2", "model": "m", "draft": "exit:0"}.items()
    # What things are called changes no result.
    assert {row["model"] for row in again[replace(RUNS[0], labels={"model": "x"})]} == {"x"}
    done: list[Run] = []

    def counted(some: Sequence[Run]) -> list[list[Mapping[str, Any]]]:
        done.extend(some)
        return find(some)

    again.find_out(RUNS, counted, {})
    assert done == RUNS[2:]
    assert len({Run("costs", {"a": 1}).key, Run("text", {"a": 1}).key, Run("costs", {"a": 2}).key}) == 3


@pytest.mark.parametrize("name", ["draft", "model", "torch", "run", "number"])
def test_no_figure_is_called_as_what_it_was_measured_under(name: str) -> None:
    with pytest.raises(BenchError, match=f"called {name}, as columns of the run"):
        Run("costs", {"draft": "exit:0"}, {"model": "m"}).rows([{"value": 1, name: 2}], {"torch": "2"})


def test_of_one_thing_the_latest_counts_where_the_first_was() -> None:
    runs = Runs(None)
    for number, run in enumerate((RUNS[0], RUNS[1], RUNS[0])):
        runs.keep(run.rows([{"value": number}], {}))
    assert [row["value"] for row in runs.measured("costs")] == [2, 1]


def test_a_run_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.find_out(RUNS[:2], find, {})
    file = tmp_path / FILE
    file.write_text(file.read_text()[:-20])
    again = Runs(tmp_path)
    assert RUNS[0] in again
    assert RUNS[1] not in again
    again.find_out(RUNS[1:2], find, {})
    assert [row["value"] for row in Runs(tmp_path)[RUNS[1]]] == ["exit:1", 2]


def test_an_error_is_a_result_and_ends_no_other_run() -> None:
    def fails(some: Sequence[Run]) -> list[list[Mapping[str, Any]]]:
        if RUNS[1] in some:
            raise ZeroDivisionError("of all things")
        return find(some)

    runs = Runs(None)
    runs.find_out(RUNS, fails, {})
    assert [len(runs[run]) for run in RUNS] == [2, 1, 2, 2]
    assert runs[RUNS[1]][0]["error"].startswith("ZeroDivisionError: of all things (test_runs.py:")


def test_a_place_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="is a file; give a folder"):
        Runs(tmp_path / "file")
    with pytest.raises(BenchError, match="holds other files"):
        Runs(tmp_path)
    runs = Runs(tmp_path / "folder")
    (tmp_path / "folder").write_text("")
    with pytest.raises(StorageError, match="what was measured before is kept"):
        runs.find_out(RUNS[:1], find, {})


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
    before = origin(model)
    try:
        CHANGES[change](model)
        after = origin(model)
    finally:
        torch.set_num_threads(threads)
    assert after["setting"] != before["setting"]
    assert (after["weights"] == before["weights"]) == (change not in ("tuned", "rounded"))


def test_where_a_model_lies_makes_none(tmp_path: Path) -> None:
    model = tiny.llama()
    before = origin(model)
    model.save_pretrained(tmp_path / "model")
    model.generate(tiny.prompt(4), max_new_tokens=2, do_sample=False)
    assert origin(model) == before
    assert origin(type(model).from_pretrained(tmp_path / "model", dtype=model.dtype)) == before
    with pytest.raises(BenchError, match="not in memory: load the model whole"):
        origin(model.to("meta"))


class Mild(TokenLevel):
    def __init__(self, by: float) -> None:
        self.by = by


def _head(weight: float = 0.0, token: int = 3) -> ExitHead:
    adapter = nn.Linear(2, 2)
    nn.init.constant_(adapter.weight, weight)
    nn.init.zeros_(adapter.bias)
    return ExitHead(2, DraftHead(adapter, torch.tensor([1, 2, token])), "base")


@pytest.mark.parametrize(
    "made",
    [
        _head,
        lambda by: _head(token=round(10 * by)),
        Mild,
        lambda by: profile_of(tiny.llama(), replace(GREEDY, speedup=(by, by, by))),
    ],
)
def test_drafts_and_rules_of_one_name_are_told_apart(made: Callable[[float], Any]) -> None:
    assert content(made(0.5)) == content(made(0.5)) != content(made(0.7))


def test_two_of_one_name_are_not_studied_at_once() -> None:
    with pytest.raises(StudyError, match="2 of what is given are called head:this exit head@2"):
        Given.of([_head(0.5), _head(0.7)])


SPECS = [ArmSpec("generate"), ArmSpec("plain"), ArmSpec("draft", "lookup+exit:2")]
CELLS = {Cell("w", temperature, 1, 6, 16): [Prompts.of_one_length(torch.arange(6)[None])] for temperature in (0.0, 0.8)}
# Every arm warms up once and is timed once, on one batch.
STEPS = 2
SPEED: frozenset[Part] = frozenset({"speed"})


def run(
    model: PreTrainedModel,
    folder: Path,
    watch: Notes | None = None,
    specs: list[ArmSpec] = SPECS,
    parts: frozenset[Part] = SPEED,
) -> list[Row]:
    arms = [make_arm(spec, model) for spec in specs]
    generations = Generations(name="tiny", model=model, arms=arms, repeats=1, warm_up=1, parts=parts)
    return generations.measure(CELLS, Runs(folder), watch or Notes())


def test_a_cell_is_not_run_again(llama: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(llama, tmp_path, Notes(interrupted_at=STEPS * len(SPECS)))
    watch = Notes()
    rows = run(llama, tmp_path, watch)
    assert len(watch.steps) == watch.expected == STEPS * len(SPECS)
    missing = [*CELLS][1]
    assert set(watch.steps) == {f"cell 1 of 1: {missing.workload}, {missing.decoding}"}
    again = Notes()
    assert run(llama, tmp_path, again) == rows == Runs(tmp_path).measured("generation")
    assert (again.expected, again.steps) == (0, [])
    # Each text is a row that says what it was measured with.
    assert len(rows) == len(CELLS) * len(SPECS)
    for row in rows:
        assert len(row["token_ids"]) == row["new_tokens"] == 16
        assert row.items() >= origin(llama).items()
        assert row["seed"] == 0
        assert all(row[name] for name in ("torch", "transformers", "selfspec", "prompts"))
        assert row.get("equal", True)
    assert {row["passes"] for row in rows if row["arm"] == "selfspec plain"} == {16}


@pytest.mark.tools
def test_another_arm_or_model_is_measured_with_all_the_others(llama: PreTrainedModel, tmp_path: Path) -> None:
    run(llama, tmp_path)
    rows = run(llama, tmp_path, specs=[*SPECS, ArmSpec("draft", "exit:1")])
    # Of each cell those that were timed together last count.
    assert latest(Runs(tmp_path).measured("generation")) == rows
    run(tiny.llama(dtype=torch.float32), tmp_path)
    assert len(latest(Runs(tmp_path).measured("generation"))) == len(rows) + len(CELLS) * len(SPECS)


@pytest.mark.tools
def test_two_models_with_one_draft_or_another_share_a_folder(tmp_path: Path) -> None:
    alone = run(tiny.llama(seed=1), tmp_path / "alone", specs=SPECS[2:], parts=frozenset({"acceptance"}))
    shared = tmp_path / "shared"
    run(tiny.llama(seed=2), shared, specs=SPECS[2:], parts=frozenset({"acceptance"}))
    both = run(tiny.llama(seed=1), shared, specs=SPECS[2:], parts=frozenset({"acceptance"}))
    run(tiny.llama(seed=2), shared, specs=[ArmSpec("draft", "exit:1")], parts=frozenset({"acceptance"}))
    assert [row["token_ids"] for row in both] == [row["token_ids"] for row in alone]
    table = summarise(latest(Runs(shared).measured("generation")))
    assert len(table) == 3 * len(CELLS)
    assert set(table["model"]) == {f"tiny {origin(tiny.llama(seed=seed))['weights'][:8]}" for seed in (1, 2)}


@pytest.mark.tools
def test_acceptance_alone_decodes_each_prompt_once(llama: PreTrainedModel, tmp_path: Path) -> None:
    watch, vocabulary = Notes(), tmp_path / "vocabulary.json"
    write_sealed(vocabulary, {"tokens": [1, 2, 3, 4]})
    drafts = [ArmSpec("draft", name, length=2) for name in ("exit:1", "int8", f"exit:1+vocab:{vocabulary}", "recycle")]
    parts: frozenset[Part] = frozenset({"acceptance", "quality"})
    folder = tmp_path / "runs"
    rows = run(llama, folder, watch, drafts, parts)
    assert len(watch.steps) == len(drafts) * len(CELLS)
    assert not any(name.endswith("seconds") and name != "work_seconds" for row in rows for name in row)
    table = summarise(rows)
    assert (table["mean_accepted_length"] >= 1).all()
    assert table["perplexity"].notna().all()
    # A further draft leaves those that were counted as they are; a draft that has changed is another.
    more = ArmSpec("draft", "exit:2", length=2)
    write_sealed(vocabulary, {"tokens": [3, 4, 5]})
    watch = Notes()
    run(llama, folder, watch, [more, *drafts], parts)
    assert len(watch.steps) == 2 * len(CELLS)


def test_nats_are_those_of_the_text_after_its_prompt(stories: PreTrainedModel) -> None:
    prompt, row = [5, 6, 7], [8, 9]
    ids = torch.tensor([[*prompt, *row]])
    ((found,),) = nats_of(stories, [Prompts.of_one_length(torch.tensor([prompt]))], [[row]])
    with torch.no_grad():
        logs = stories(ids).logits[0].log_softmax(-1)
    assert found == pytest.approx(-float(logs[2, 8] + logs[3, 9]), rel=1e-5)


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
    assert leaving.c.value > 0
    assert looking_up.c.value == 0
    for costs, steps in ((leaving, 3), (looking_up, 0)):
        cost = costs.of_round(steps, 3)
        assert 0 < cost.low <= cost.value <= cost.high
    assert leaving.of_round(0, 0).value == 1
