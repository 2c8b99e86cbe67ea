"""What a calibration chooses: by planted figures, and once through on a tiny model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from helpers import published_heads, tiny
from helpers.studies import Guess, known
from selfspec import Profile, wrap
from selfspec.accept import TokenLevel
from selfspec.control import CostAware, FixedLength
from selfspec.control.costs import Costs
from selfspec.decode.output import Stats
from selfspec.draft import (
    Budget,
    Cascade,
    Draft,
    EarlyExit,
    LayerSkip,
    LowPrecision,
    PromptLookup,
    RowsView,
    Stateless,
    Suffixes,
)
from selfspec.errors import DraftConfigError, PromptError
from selfspec.measure.costs import MeasuredCosts, measure_costs
from selfspec.measure.watch import Watch
from selfspec.model.registry import find_adapter
from selfspec.tools.calibrate import calibration as running
from selfspec.tools.calibrate import candidates
from selfspec.tools.calibrate.calibration import Confirmed, calibrate, fastest
from selfspec.tools.calibrate.candidates import (
    Candidate,
    considered,
    costs_of,
    fitting,
    predicted,
    to_confirm,
    to_measure,
)
from selfspec.tools.calibrate.measurements import Measurements
from selfspec.tools.lab.arms import Call, Cell, OwnArm, Prompts, batched
from selfspec.tools.lab.drafts import paths_of
from selfspec.tools.lab.generations import rows_of
from selfspec.tools.lab.table import records, summarise


@dataclass(frozen=True)
class Repeat(Stateless):
    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return Draft.chain(rows.last_tokens.repeat(1, budget.depth))


SETTINGS = Measurements(max_new_tokens=8, repeats=1, longest_draft=1)


def _costs(**steps: float) -> MeasuredCosts:
    """Drafts whose steps cost so much, with passes that cost one and no overhead."""
    names = {name.replace("_", ":"): cost for name, cost in steps.items()} | {"none": 0.0}
    return MeasuredCosts(
        step_seconds=known(0.01),
        draft={name: known(cost) for name, cost in names.items()},
        verify={name: {2: known(1.0), 5: known(1.0)} for name in names},
        overhead={name: known(0.0) for name in names},
        context=1,
        batch=1,
        lengths=(1, 4),
    )


def test_drafts_that_are_given_take_the_place_of_exits_and_of_nothing_else() -> None:
    exact, low = ["exit:1", "exit:2", "exit:3"], ["int8", "int4", "int8+exit:1", "int8+exit:2", "int8+exit:3"]
    assert list(considered(4, None)) == [*exact, *low, "mtp"]
    assert list(considered(4, None, 1023)) == list(considered(4, None))
    assert {*considered(4, None, 1024)} - {*considered(4, None)} == {"int8+window:512"}
    assert "int8+window:512" in considered(4, [EarlyExit(1)], 1024)
    # Fewer bits and what checkpoints bring along need no training, and are never dropped for what was named.
    assert list(considered(4, [LayerSkip(layers=[1])])) == ["skip:layers=1", "int8", "int4", "mtp"]
    assert list(considered(4, [LowPrecision(4), EarlyExit(1)])) == ["int4", "exit:1", "int8", "mtp"]


@pytest.mark.parametrize("drafts", [[None], [Guess((1,))], [EarlyExit(4)], [EarlyExit(1), EarlyExit(1)]])
def test_drafts_that_cannot_be_considered_are_refused(drafts: list[Any]) -> None:
    with pytest.raises(DraftConfigError):
        considered(4, drafts)


@pytest.mark.tools
def test_a_module_in_the_checkpoint_is_tried_without_being_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(levels: int, costs: Costs, nodes: int | None) -> FixedLength:
        return FixedLength(levels, nodes=nodes)

    # Whether drafts of a tiny model pay is a matter of the machine's load.
    monkeypatch.setattr(running, "CostAware", always)
    made = published_heads.mtp(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    profile = calibrate(made.model, [tiny.prompt(5)], [EarlyExit(3)], replace(SETTINGS, nodes=4))
    for kind in ("greedy", "sampled"):
        tried = {each["name"]: each for each in profile.report[kind]["confirmed"]}
        assert tried["mtp"]["acceptance_rate"] is not None
        assert "mtp, 4 nodes" in tried
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: each for name, each in weights.items() if "layers.4" not in name}, tmp_path / "model.safetensors")
    adapter = find_adapter(made.model)
    assert "mtp" not in fitting(considered(4, None), made.model, adapter)
    assert "mtp" not in fitting(considered(4, None), tiny.llama(), adapter)


def test_any_draft_may_be_considered_and_its_path_is_measured() -> None:
    found = considered(4, [Cascade(PromptLookup(), LayerSkip(layers=[1])), Repeat()])
    assert list(found) == ["lookup+skip:layers=1", f"{__name__}:Repeat", "int8", "int4", "mtp"]
    assert list(paths_of(found.values())) == ["skip:layers=1", "int8", "int4"]
    others = [Candidate(each) for each in list(found.values())[:2]]
    costs = _costs(skip_layers=0.5)
    assert list(to_confirm({}, paths_of(found.values()), others=others)) == [*list(found)[:2], "lookup"]
    assert costs_of(others[1], costs).draft == 0
    assert costs_of(Candidate(Repeat(), step=0.3), costs).draft == 0.3


def test_of_many_exits_those_with_promise_are_measured() -> None:
    model = tiny.llama(num_hidden_layers=12)
    drafters = paths_of(considered(12, None).values())
    rates = {name: 0.9 if name in ("exit:2", "exit:11") else 0.1 for name in drafters}
    measured = to_measure(model, find_adapter(model), drafters, [rates])
    assert len(measured) == 6
    assert EarlyExit(2) in measured
    few = paths_of(considered(4, [EarlyExit(1), EarlyExit(2)]).values())
    assert to_measure(model, find_adapter(model), few, [rates]) == list(few.values())


def test_a_model_that_is_quantised_is_not_quantised_again(llama: PreTrainedModel) -> None:
    llama.config.quantization_config = {}
    for layer in llama.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    fit = fitting(considered(4, None), llama, find_adapter(llama))
    assert list(fit) == ["exit:1", "exit:2", "exit:3"]


def test_predictions_are_the_formulas_and_in_order() -> None:
    rates = {"exit:1": 0.5, "exit:2": 0.8}
    found = predicted(rates, _costs(exit_1=0.2, exit_2=0.3), longest=4)
    assert list(found) == ["exit:2", "exit:1"]
    best = found["exit:2"]
    lengths = {gamma: (1 - 0.8 ** (gamma + 1)) / (1 - 0.8) / (gamma * 0.3 + 1) for gamma in range(1, 5)}
    assert best.speedup == pytest.approx(max(lengths.values()))
    assert lengths[best.draft_length] == max(lengths.values())


def test_paths_without_promise_are_not_confirmed_and_look_ups_are() -> None:
    costs = _costs(exit_1=0.2, exit_2=0.3, exit_3=0.4)
    drafters = paths_of(considered(4, None).values())
    rates = {"exit:1": 0.9, "exit:2": 0.5, "exit:3": 0.95}
    found = to_confirm(predicted(rates, costs, 4), drafters)
    assert list(found) == ["lookup", "exit:1", "lookup+exit:1", "exit:3", "lookup+exit:3"]
    assert [costs_of(each, costs).draft for each in found.values()] == [0.0, 0.2, 0.2, 0.4, 0.4]
    useless = dict.fromkeys(rates, 0.0)
    assert list(to_confirm(predicted(useless, costs, 4), drafters)) == ["lookup"]


def test_trees_of_two_sizes_are_tried_along_the_best_path_and_recycling_with_them() -> None:
    costs = _costs(exit_1=0.2, exit_3=0.4)
    predictions = predicted({"exit:1": 0.9, "exit:3": 0.95}, costs, 4)
    found = to_confirm(predictions, paths_of(considered(4, None).values()), nodes=6)
    assert list(found)[-4:-2] == ["exit:1, 3 nodes", "exit:1, 6 nodes"]
    assert [(each.nodes, each.levels(4)) for each in found.values()][-4:-2] == [(3, 3), (6, 4)]
    assert found["exit:1"].levels(4) == 4
    assert len(to_confirm(predictions, paths_of(considered(4, None).values()), nodes=1)) == len(found) - 4
    names = ["recycle, 3 nodes", "recycle, 6 nodes"]
    assert list(found)[-2:] == names
    assert [costs_of(found[name], costs).draft for name in names] == [0.0, 0.0]
    assert "suffix, 6 nodes" in to_confirm({}, {}, 6, [Candidate(Suffixes())])


def _confirmed(**speedups: float) -> list[Confirmed]:
    return [Confirmed(name.replace("_", ":"), known(value), 0.5, 2.0, 1) for name, value in speedups.items()]


def _confirming(by_temperature: dict[float, list[Confirmed]], in_batches: dict[int, float]) -> Any:
    """Confirms so in single rows, and so in batches of four rows or more."""

    def confirm(_: object, given: Any, costs: MeasuredCosts, grouped: Any, temperature: float, *__: object) -> Any:
        rows = grouped[0].ids.shape[0]
        assert costs.batch == rows
        if rows < min(in_batches):
            return SimpleNamespace(confirmed=by_temperature[temperature])
        (name,) = given
        batch = replace(by_temperature[temperature][0], name=name, speedup=known(in_batches[rows]))
        return SimpleNamespace(confirmed=[batch])

    return confirm


def test_the_fastest_that_is_surely_faster_is_chosen() -> None:
    best: Any = fastest(_confirmed(lookup=1.1, exit_1=1.3, exit_2=1.2))
    assert (best.name, best.speedup.value) == ("exit:1", 1.3)
    assert fastest(_confirmed(lookup=0.99)) is None
    unsure, sure = _confirmed(exit_1=1.4, exit_2=1.2)
    unsure = replace(unsure, speedup=replace(unsure.speedup, low=0.95))
    assert fastest([unsure, sure]) == sure
    assert fastest([unsure]) is None


def test_candidates_are_timed_in_turns_and_slow_ones_drop_out(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {"none": 1.0, "lookup": 2.0, "exit:1": 0.5, "lookup+exit:1": 0.8, "exit:3": 4.0, "lookup+exit:3": 0.9}
    costs = _costs(exit_1=0.1, exit_3=0.1)
    predictions = predicted({"exit:1": 0.9, "exit:3": 0.9}, costs, 4)
    candidates = to_confirm(predictions, paths_of(considered(4, None).values()))
    plain: Any = SimpleNamespace(drafting=lambda *given: None, model=None)
    seeds: list[int] = []

    def decode(arm: OwnArm, prompts: Prompts, cell: Cell, seed: int) -> Call:
        seeds.append(seed)
        # A hiccup in one turn changes nothing.
        seconds = 10 * planted[arm.spec.draft or "none"] + (9.0 if len(seeds) == 40 else 0.0)
        return Call([[0] * 11], 50 + seconds, 50.0, 1, 5, Stats(rounds=5, row_rounds=5, new_tokens=11), seed=seed)

    monkeypatch.setattr(OwnArm, "decode", decode)
    prompts = batched([tiny.prompt(4), tiny.prompt(6)], 1)
    trial = running.confirm(plain, candidates, costs, prompts, 0.0, replace(SETTINGS, repeats=3, seed=7), Watch())
    confirmed = trial.confirmed
    assert confirmed[0].name == "exit:1"
    assert {each.name: each.speedup.value for each in confirmed} == pytest.approx(
        {name: 1 / seconds for name, seconds in planted.items() if name != "none"}
    )
    turns = {"exit:1": 3, "lookup+exit:1": 3, "lookup+exit:3": 3, "lookup": 1, "exit:3": 1}
    assert {each.name: each.turns for each in confirmed} == turns
    # Each turn has draws of its own, after two untimed ones.
    timed = [[call.seed for calls in run.calls for call in calls] for run in trial.runs]
    assert timed[0] == [*range(7, 13)]
    assert timed[1] == [7, 8]
    # The report of what is kept states the same speeds.
    rows = rows_of(tiny.llama(), "tiny", trial.cell, trial.prompts, trial.runs)
    kept = {row["draft"]: row["speedup"] for row in records(summarise(rows)) if "draft" in row}
    assert kept == pytest.approx({each.name: each.speedup.value for each in confirmed})


def test_batches_are_filled_up_and_padded_on_the_left() -> None:
    prompts = [tiny.prompt(2), tiny.prompt(4, seed=1), tiny.prompt(3, seed=2)]
    first, second = batched(prompts, 2)
    assert first.ids[0].tolist() == [0, 0, *prompts[0][0].tolist()]
    assert first.mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert second.ids[1].tolist() == [0, 0, *prompts[0][0, :1].tolist()]
    assert second.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    more = batched(prompts, 2, texts=5)
    assert len(more) == 3
    assert more[2].ids.tolist() == [prompts[1][0, :3].tolist(), [0, *prompts[2][0, :2].tolist()]]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama()


@pytest.fixture
def promising(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_WORTH_CONFIRMING", 0.0)
    monkeypatch.setattr(candidates, "_MOST_PATHS", 9)


@pytest.mark.tools
def test_a_calibration_reports_all_it_measured(model: PreTrainedModel) -> None:
    found = calibrate(model, [tiny.prompt(5)], [EarlyExit(3)], SETTINGS)
    assert set(found.report) == {"load", "doubts", "settings", "costs", "in_batches", "greedy", "sampled"}
    assert set(found.report["costs"]["draft"]) == {"none", "exit:3", "int8", "int4"}
    for name, chosen, temperature in (("greedy", found.greedy, 0.0), ("sampled", found.sampled, 0.8)):
        kind = found.report[name]
        assert kind["temperature"] == chosen.temperature == temperature
        assert set(kind["acceptance"]) == set(kind["predictions"]) == {"exit:3", "int8", "int4"}
        assert kind["acceptance"]["exit:3"]["n"] == 1
        assert "lookup" in {each["name"] for each in kind["confirmed"]}
        sure = [each for each in kind["confirmed"] if each["speedup"]["low"] > 1]
        label = chosen.draft if chosen.nodes is None else f"{chosen.draft}, {chosen.nodes} nodes"
        assert label == (sure[0]["name"] if sure else "none")


@pytest.mark.tools
def test_drafts_of_any_kind_are_tried_by_name_and_as_objects_with_a_rule(model: PreTrainedModel) -> None:
    profile = calibrate(model, tiny.prompt(5, batch=2), ["lookup+exit:3", Repeat()], SETTINGS, accept=TokenLevel())
    assert set(profile.report["costs"]["draft"]) == {"none", "exit:3", "int8", "int4"}
    tried = {each["name"] for each in profile.report["greedy"]["confirmed"]}
    assert {"lookup+exit:3", f"{__name__}:Repeat"} <= tried


@pytest.mark.tools
@pytest.mark.usefixtures("promising")
def test_a_tree_may_be_what_is_chosen(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wide = [replace(each, name="exit:3, 8 nodes") for each in _confirmed(exit_3=1.5)]
    monkeypatch.setattr(running, "confirm", _confirming({0.0: wide, 0.8: _confirmed(lookup=0.9)}, {4: 1.1, 16: 1.1}))
    # Which path promises most is a matter of time, where there are several.
    monkeypatch.setattr(running, "considered", lambda depth, drafters, context: {"exit:3": EarlyExit(3)})
    found = calibrate(model, [tiny.prompt(6)], [EarlyExit(3)], replace(SETTINGS, nodes=8, longest_draft=2))
    assert (found.greedy.draft, found.greedy.nodes, found.greedy.longest) == ("exit:3", 8, 2)
    assert list(found.report["greedy"]["in_batches"]) == ["4", "16"]
    found.save(tmp_path / "profile.json")
    read = Profile.load(tmp_path / "profile.json")
    assert read == found
    assert read.choose_draft(greedy=True).control == CostAware(2, nodes=8)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.tools
@pytest.mark.usefixtures("promising")
def test_what_was_chosen_is_measured_in_batches_of_other_sizes(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    confirmed = {0.0: _confirmed(exit_3=1.5, lookup=1.2), 0.8: _confirmed(lookup=1.5)}
    monkeypatch.setattr(running, "confirm", _confirming(confirmed, {4: 1.1, 16: 1.1}))
    measured: list[MeasuredCosts] = []

    def noted(*args: Any, **options: Any) -> MeasuredCosts:
        measured.append(measure_costs(*args, **options))
        return measured[-1]

    monkeypatch.setattr(running, "measure_costs", noted)
    found = calibrate(model, [tiny.prompt(6)], [EarlyExit(3)], replace(SETTINGS, batch=batch))
    sizes = sorted({batch, 1, 4, 16})
    assert [each["batch"] for each in found.report["in_batches"]] == [rows for rows in sizes if rows != batch]
    # At the batch of the calibration fewer bits are measured beside what was named; at others, what was chosen.
    batches = [each.batch for each in measured]
    assert sorted(batches) == sizes
    for each in measured:
        own = {"int8", "int4"} if each.batch == batch else set()
        assert each.draft.keys() == {"exit:3", "none"} | own
    every: Any = ((found.greedy, "exit:3"), (found.sampled, "none"))
    for chosen, name in every:
        costs = {costs.rows: costs for costs in chosen.costs.measured}
        assert list(costs) == sizes
        assert costs == {each.batch: each.of(name) for each in measured}


@pytest.mark.parametrize(
    ("in_batches", "tried", "most_rows"),
    [({4: 1.1, 16: 1.2}, [4, 16], None), ({4: 1.1, 16: 1.0}, [4, 16], 15), ({4: 0.9, 16: 1.2}, [4], 3)],
    ids=["pays in all", "pays in some", "pays in none"],
)
@pytest.mark.tools
@pytest.mark.usefixtures("promising")
def test_batches_in_which_drafts_lose_are_decoded_plainly(
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    in_batches: dict[int, float],
    tried: list[int],
    most_rows: int | None,
) -> None:
    confirmed = {0.0: _confirmed(exit_3=1.5), 0.8: _confirmed(lookup=0.9)}
    monkeypatch.setattr(running, "confirm", _confirming(confirmed, in_batches))
    found = calibrate(model, [tiny.prompt(6)], [EarlyExit(3)], SETTINGS)
    assert [int(rows) for rows in found.report["greedy"]["in_batches"]] == tried
    assert (found.greedy.draft, found.greedy.most_rows) == ("exit:3", most_rows)
    assert (found.sampled.draft, found.report["sampled"]["in_batches"]) == ("none", {})
    spec = wrap(model, draft=found)
    for rows in (1, 3, 4, 15, 16):
        prompts = torch.cat([tiny.prompt(6, seed=seed) for seed in range(rows)])
        stats = spec.generate(prompts, max_new_tokens=4, do_sample=False, draft_length=1).stats
        assert (stats.drafted > 0) is (most_rows is None or rows <= most_rows)


@pytest.mark.parametrize(("ragged", "others"), [("mask", [4]), ("none", [])])
@pytest.mark.tools
def test_batches_without_room_in_memory_or_whose_rows_cannot_be_told_apart_are_left_out(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, ragged: Any, others: list[int]
) -> None:
    def short_of_memory(*args: Any, **options: Any) -> MeasuredCosts:
        if options["batch"] == 16:
            raise torch.OutOfMemoryError
        return measure_costs(*args, **options)

    always = dict.fromkeys((0.0, 0.8), _confirmed(lookup=1.5))
    monkeypatch.setattr(running, "confirm", _confirming(always, {4: 1.1}))
    monkeypatch.setattr(running, "measure_costs", short_of_memory)
    adapter = replace(find_adapter(model), ragged=ragged)
    found: Any = calibrate(model, [tiny.prompt(6)], [EarlyExit(3)], SETTINGS, adapter=adapter)
    assert [each["batch"] for each in found.report["in_batches"]] == others
    assert [costs.rows for costs in found.greedy.costs.measured] == [1, *others]


@pytest.mark.parametrize(
    "prompts", [[], [tiny.prompt(4)[0]], [tiny.prompt(4, batch=2)], [tiny.prompt(tiny.CONTEXT - 5)]]
)
def test_prompts_that_cannot_be_gone_on_with_are_refused(model: PreTrainedModel, prompts: list[torch.Tensor]) -> None:
    with pytest.raises(PromptError):
        calibrate(model, prompts, measurements=SETTINGS)
