"""Profiles on disk: what is written is read, and what is damaged, foreign or of elsewhere is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers import tiny
from helpers.studies import GREEDY, SAMPLED, profile_of
from selfspec import Profile
from selfspec.control import CostAware
from selfspec.control.costs import BatchCosts, Costs
from selfspec.control.profile import VARIABLE, DraftChoice, Setting, default_file, find_profile, folder
from selfspec.draft import Cascade, EarlyExit, PromptLookup
from selfspec.errors import ProfileError, StorageError


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


def test_plain_decoding_may_be_the_fastest(tmp_path: Path, llama: PreTrainedModel) -> None:
    plain = replace(GREEDY, draft="none", costs=None)
    profile_of(llama, greedy=plain).save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").choose_draft(greedy=True).draft is None


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
    ],
    ids=str,
)
def test_costs_that_cannot_be_or_are_missing_are_refused(file: Path, costs: dict[str, float | None]) -> None:
    def damage(content: dict[str, Any]) -> None:
        whole = content["greedy"]["costs"]["measured"][1] | costs
        content["greedy"]["costs"]["measured"][1] = {name: value for name, value in whole.items() if value is not None}

    damaged(file, damage)
    with pytest.raises(ProfileError, match=r"greedy\.costs"):
        Profile.load(file)


@pytest.mark.parametrize("measured", [None, {}, [], [1], ["same", "same"]])
def test_lists_of_costs_that_cannot_be_are_refused(file: Path, measured: Any) -> None:
    def damage(content: dict[str, Any]) -> None:
        costs = content["greedy"]["costs"]
        costs["measured"] = [costs["measured"][0] if each == "same" else each for each in measured or []] or measured

    damaged(file, damage)
    with pytest.raises(ProfileError, match=r"greedy\.costs"):
        Profile.load(file)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', "\x80", "[" * 100_000, "1" * 5000])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ProfileError, match="calibrate"):
        Profile.load(file)


def test_a_missing_file_is_refused_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="selfspec calibrate MODEL --to"):
        Profile.load(tmp_path / "none.json")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, llama: PreTrainedModel) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        profile_of(llama).save(tmp_path / "file" / "profile.json")


def test_a_setting_knows_what_it_is(llama: PreTrainedModel) -> None:
    setting = Setting.of(llama)
    assert setting.differences(setting) == {}
    assert setting.dtype == "float64"
    assert setting.threads == torch.get_num_threads()
    assert setting.device
    other = Setting.of(tiny.llama(seed=1, dtype=torch.float32))
    assert set(setting.differences(other)) == {"fingerprint", "dtype"}


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


def test_the_profile_of_a_setting_is_found(profiles: Path, llama: PreTrainedModel) -> None:
    profile = profile_of(llama)
    profile.save(default_file(profile.setting))
    assert default_file(profile.setting).parent == profiles
    assert find_profile(Setting.of(llama)) == profile


def test_weights_that_were_never_calibrated_have_none(profiles: Path, llama: PreTrainedModel) -> None:
    assert find_profile(Setting.of(llama)) is None


def test_a_profile_for_other_threads_is_named(profiles: Path, llama: PreTrainedModel) -> None:
    setting = replace(Setting.of(llama), threads=7)
    replace(profile_of(llama), setting=setting).save(default_file(setting))
    with pytest.raises(ProfileError, match=r"CPU threads 7 there, 1 here.*selfspec calibrate MODEL --dtype float64"):
        find_profile(Setting.of(llama))


@pytest.mark.parametrize(
    ("name", "words"),
    [("torch", "torch version 0.0"), ("selfspec", "selfspec version 0.0"), ("transformers", "transformers version")],
)
def test_a_profile_of_other_versions_is_refused(profiles: Path, llama: PreTrainedModel, name: str, words: str) -> None:
    setting = replace(Setting.of(llama), **{name: "0.0"})  # type: ignore[arg-type]
    replace(profile_of(llama), setting=setting).save(default_file(setting))
    with pytest.raises(ProfileError, match=words):
        find_profile(Setting.of(llama))


def test_weights_that_begin_alike_are_distinguished(profiles: Path, llama: PreTrainedModel) -> None:
    here = Setting.of(llama)
    there = replace(here, fingerprint=here.fingerprint[:16] + "0" * 48)
    replace(profile_of(llama), setting=there).save(default_file(there))
    with pytest.raises(ProfileError, match="weights"):
        find_profile(here)
