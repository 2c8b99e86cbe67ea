"""Profiles on disk, read or refused by name, and generation by them: each kind of decoding has its own draft."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import assert_alike
from helpers.studies import COSTS, GREEDY, SAMPLED, profile_of
from selfspec import FixedLength, Profile, wrap
from selfspec.control import CostAware
from selfspec.control.costs import BatchCosts, Costs
from selfspec.control.profile import (
    VARIABLE,
    DraftChoice,
    Setting,
    default_file,
    find_profile,
    folder,
    uncalibrated_draft,
)
from selfspec.draft import Cascade, EarlyExit, PromptLookup
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import DraftConfigError, ProfileError


@pytest.fixture
def file(tmp_path: Path, llama: PreTrainedModel) -> Path:
    written = tmp_path / "deep" / "profile.json"
    profile_of(llama).save(written)
    return written


def test_what_is_written_is_read(file: Path, llama: PreTrainedModel) -> None:
    read = Profile.load(file)
    assert read == profile_of(llama)
    assert read.report == {"settings": {"prompts": 1}}
    assert read.source == str(file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_it_chooses_by_kind(file: Path) -> None:
    profile = Profile.load(file)
    assert profile.choose_draft(greedy=True) == DraftChoice(
        Cascade(PromptLookup(), EarlyExit(2)), CostAware(5), GREEDY.costs, 4
    )
    assert profile.choose_draft(greedy=False) == DraftChoice(EarlyExit(1), CostAware(3), SAMPLED.costs)


def test_a_tree_has_nodes(tmp_path: Path, llama: PreTrainedModel) -> None:
    profile_of(llama, greedy=replace(GREEDY, nodes=8)).save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").choose_draft(greedy=True).control == CostAware(5, nodes=8)
    for nodes in (4, 5000):
        profile_of(llama, greedy=replace(GREEDY, nodes=nodes)).save(tmp_path / "profile.json")
        with pytest.raises(ProfileError, match=f"greedy.nodes are {nodes}"):
            Profile.load(tmp_path / "profile.json")


def test_what_is_left_of_a_round_may_be_negative(tmp_path: Path, llama: PreTrainedModel) -> None:
    # It is measured as a difference; on a busy machine it may be as large as a pass.
    assert GREEDY.costs is not None
    costs = BatchCosts(tuple(replace(each, verify=1.0, overhead=-1.3) for each in GREEDY.costs.measured))
    profile_of(llama, greedy=replace(GREEDY, costs=costs)).save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").greedy.costs == costs


Damage = Callable[[dict[str, Any]], object]
DAMAGES: dict[str, Damage] = {
    "format": lambda content: content.update(format=1),
    "setting": lambda content: content.pop("setting"),
    "setting.threads": lambda content: content["setting"].update(threads="2"),
    "setting.torch": lambda content: content["setting"].pop("torch"),
    "greedy": lambda content: content.update(greedy=[]),
    "greedy.draft": lambda content: content["greedy"].update(draft=4),
    "is not understood": lambda content: content["greedy"].update(draft="rm -rf"),
    "greedy.longest": lambda content: content["greedy"].update(longest=0),
    "sampled.longest": lambda content: content["sampled"].update(longest=True),
    "greedy.costs": lambda content: content["greedy"].update(costs=None),
    "sampled.costs": lambda content: content["sampled"]["costs"]["measured"][0].pop("verify"),
    "greedy.speedup": lambda content: content["greedy"].update(speedup=[1.0]),
    "sampled.speedup": lambda content: content["sampled"].update(speedup=[1.0, "2", 3.0]),
    "greedy.most_rows": lambda content: content["greedy"].update(most_rows=0),
    "sampled.most_rows": lambda content: content["sampled"].update(most_rows=2.5),
    "sampled.temperature": lambda content: content["sampled"].update(temperature=None),
    "report": lambda content: content.pop("report"),
}


def damaged(file: Path, damage: Damage) -> None:
    content = json.loads(file.read_text())
    del content["checksum"]
    damage(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("named", DAMAGES)
def test_what_is_damaged_is_refused_by_name(file: Path, named: str) -> None:
    damaged(file, DAMAGES[named])
    with pytest.raises(ProfileError, match=named) as refused:
        Profile.load(file)
    assert str(file) in str(refused.value)
    assert "calibrate" in str(refused.value) or named == "is not understood"


@pytest.mark.parametrize(
    "costs",
    [
        *({each.name: None} for each in fields(Costs)),
        {"draft": -0.1},
        {"widening": -1.0},
        {"each_row": -1.0},
        {"out_of_step": 0.9},
        {"rows": 0},
        {"verify": -2.0},
        {"verify": 0},
        {"overhead": float("nan")},
        # In place of the list of costs.
        *(None, 3, [], [1], "the same twice"),
    ],
    ids=str,
)
def test_costs_that_cannot_be_or_are_missing_are_refused(file: Path, costs: Any) -> None:
    def damage(content: dict[str, Any]) -> None:
        of_batches = content["greedy"]["costs"]
        if isinstance(costs, dict):
            whole = of_batches["measured"][1] | costs
            of_batches["measured"][1] = {name: value for name, value in whole.items() if value is not None}
        else:
            of_batches["measured"] = of_batches["measured"][:1] * 2 if isinstance(costs, str) else costs

    damaged(file, damage)
    with pytest.raises(ProfileError, match=r"greedy\.costs"):
        Profile.load(file)


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def test_profiles_lie_in_the_users_cache_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert "selfspec" in folder().parts
    monkeypatch.setenv(VARIABLE, "/elsewhere")
    assert folder() == Path("/elsewhere")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"threads": 7}, r"CPU threads 7 there, 1 here.*selfspec calibrate MODEL --dtype float64"),
        *(({name: "0.0"}, f"{name} version 0.0") for name in ("torch", "selfspec", "transformers")),
        # Weights that begin alike are distinguished.
        ({"fingerprint": "0" * 48}, "weights"),
    ],
)
@pytest.mark.usefixtures("profiles")
def test_a_profile_of_another_setting_is_refused(llama: PreTrainedModel, changed: dict[str, Any], words: str) -> None:
    here = Setting.of(llama)
    if "fingerprint" in changed:
        changed = {"fingerprint": here.fingerprint[:16] + changed["fingerprint"]}
    there = replace(here, **changed)
    replace(profile_of(llama), setting=there).save(default_file(there))
    with pytest.raises(ProfileError, match=words):
        find_profile(here)


@pytest.fixture
def calibrated(llama: PreTrainedModel, profiles: Path) -> PreTrainedModel:
    """A model whose profile lies where `auto` finds it."""
    profile = profile_of(llama)
    profile.save(default_file(profile.setting))
    return llama


def test_each_kind_of_decoding_has_its_draft(calibrated: PreTrainedModel) -> None:
    spec = wrap(calibrated, draft="auto")
    for sampling, exit_layer in ((False, 2), (True, 1)):
        # Which of both fit is checked when the model is wrapped; a call asks for its own alone.
        with mock.patch.object(EarlyExit, "path", autospec=True, side_effect=EarlyExit.path) as asked:
            spec.generate(tiny.prompt(9), max_new_tokens=12, do_sample=sampling, seed=0)
        assert {call.args[0].layer for call in asked.call_args_list} == {exit_layer}


def test_the_measured_costs_control_the_draft(llama: PreTrainedModel) -> None:
    """A draft step said to cost nothing is drafted on, one said to cost ten steps is not."""
    drafted = {}
    for cost in (0.0, 10.0):
        greedy = replace(GREEDY, draft="exit:3", longest=4, costs=BatchCosts((replace(COSTS, draft=cost),)))
        spec = wrap(llama, draft=profile_of(llama, greedy=greedy))
        stats = spec.generate(tiny.prompt(9), max_new_tokens=30, do_sample=False).stats
        drafted[cost] = stats.drafted / stats.rounds
    assert drafted[10.0] <= 1 < drafted[0.0]


def test_a_length_that_is_asked_for_wins(calibrated: PreTrainedModel) -> None:
    wrapped = wrap(calibrated, draft="auto", draft_length=2)
    called = wrap(calibrated, draft="auto")
    for stats in (
        wrapped.generate(tiny.prompt(9), max_new_tokens=10, do_sample=True, seed=0).stats,
        called.generate(tiny.prompt(9), max_new_tokens=10, do_sample=True, seed=0, draft_length=FixedLength(2)).stats,
    ):
        assert len(stats.judged_per_depth) == 2


def test_plain_decoding_where_nothing_was_faster(llama: PreTrainedModel) -> None:
    spec = wrap(llama, draft=profile_of(llama, sampled=replace(SAMPLED, draft="none", costs=None)))
    assert spec.generate(tiny.prompt(9), max_new_tokens=10, do_sample=True, seed=0).stats.drafted == 0
    assert spec.generate(tiny.prompt(9), max_new_tokens=10, do_sample=False).stats.drafted > 0


def test_a_file_is_a_profile_of_ones_own_choice(tmp_path: Path, llama: PreTrainedModel) -> None:
    file = tmp_path / "mine.json"
    profile_of(llama).save(file)
    by_name = wrap(llama, draft=f"auto:{file}")
    assert by_name.draft == Profile.load(file) == wrap(llama, draft=Profile.load(file)).draft


@pytest.mark.parametrize("changed", [{"seed": 1}, {"dtype": torch.float32}])
def test_a_profile_of_another_model_is_refused(calibrated: PreTrainedModel, changed: dict[str, Any]) -> None:
    other = tiny.llama(**changed)
    if "dtype" in changed:
        # Of the same weights there is one, so that what was measured is not lost without a word.
        with pytest.raises(ProfileError, match="selfspec calibrate"):
            wrap(other, draft="auto")
    with pytest.raises(ProfileError, match=r"there, .* here"):
        wrap(other, draft=profile_of(calibrated))


def test_a_choice_that_does_not_fit_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(DraftConfigError, match="out of range"):
        wrap(llama, draft=profile_of(llama, sampled=replace(SAMPLED, draft="exit:9")))


def test_it_cannot_be_saved_with_the_model(calibrated: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(DraftConfigError, match=r"lookup\+exit:2 or exit:1"):
        wrap(calibrated, draft="auto").save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_another_draft_of_the_same_wrapper(calibrated: PreTrainedModel) -> None:
    plain = wrap(calibrated, accept="coupled")
    drafting = plain.drafting("auto")
    assert isinstance(drafting.draft, Profile)
    assert drafting.rule is plain.rule
    sampled = [spec.generate(tiny.prompt(9), max_new_tokens=20, do_sample=True, seed=3) for spec in (plain, drafting)]
    assert torch.equal(sampled[0].sequences, sampled[1].sequences)
    assert isinstance(plain.drafting(EarlyExit(1), 3).draft, LayerPathDrafter)
    plain.unwrap()
    with pytest.raises(selfspec.errors.ClosedError):
        plain.drafting(None)


@pytest.mark.usefixtures("profiles")
def test_without_a_profile_look_ups_and_eight_bits_draft(llama: PreTrainedModel) -> None:
    spec = wrap(llama, "auto")
    assert spec.draft == selfspec.drafts.Cascade(selfspec.drafts.PromptLookup(), selfspec.drafts.LowPrecision(8))
    assert_alike(spec, inputs=tiny.prompt(9), max_new_tokens=24, do_sample=False)


def test_without_a_profile_a_quantised_model_decodes_plainly(llama: PreTrainedModel) -> None:
    llama.config.quantization_config = {}
    for layer in llama.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    assert uncalibrated_draft(llama) is None


@pytest.mark.usefixtures("profiles")
def test_a_gain_that_is_not_clear_is_left(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfspec.drafts.LowPrecision, "cost", lambda *_: 0.7)
    assert wrap(llama, "auto").draft is None
