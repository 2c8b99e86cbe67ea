"""Generation by a profile: another draft for greedy decoding than for sampling, and the model's own tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.studies import COSTS, GREEDY, SAMPLED, profile_of
from selfspec import BatchCosts, FixedLength, Profile, wrap
from selfspec.control.auto import uncalibrated_draft
from selfspec.control.profile import VARIABLE, default_file
from selfspec.draft import EarlyExit
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import DraftConfigError, ProfileError
from selfspec.model.layer_path import LayerPath


@pytest.fixture(autouse=True)
def _profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "profiles"))


@pytest.fixture
def calibrated(llama: PreTrainedModel) -> PreTrainedModel:
    """A model whose profile lies where `auto` finds it."""
    profile = profile_of(llama)
    profile.save(default_file(profile.setting))
    return llama


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> list[LayerPath]:
    """The paths that drafts are asked for, as generations go."""
    seen: list[LayerPath] = []
    path = EarlyExit.path

    def noted(self: EarlyExit, depth: int) -> LayerPath:
        seen.append(path(self, depth))
        return seen[-1]

    monkeypatch.setattr(EarlyExit, "path", noted)
    return seen


def _exits(paths: list[LayerPath]) -> set[int]:
    return {path.resume_point.layer for path in paths if path.resume_point is not None}


def test_each_kind_of_decoding_has_its_draft(calibrated: PreTrainedModel, paths: list[LayerPath]) -> None:
    spec = wrap(calibrated, draft="auto")
    for sampling, exit_layer in ((False, 2), (True, 1)):
        paths.clear()
        spec.generate(tiny.prompt(9), max_new_tokens=12, do_sample=sampling, seed=0)
        drafts = paths.copy()
        # Which of both fit is checked when the model is wrapped; a call asks for its own alone.
        assert _exits(drafts) == {exit_layer}


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


def test_without_a_profile_look_ups_and_eight_bits_draft(llama: PreTrainedModel) -> None:
    spec = wrap(llama, "auto")
    assert spec.draft == selfspec.drafts.Cascade(selfspec.drafts.PromptLookup(), selfspec.drafts.LowPrecision(8))
    ids = tiny.prompt(9)
    wanted = llama.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert torch.equal(spec.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None).sequences, wanted)


def test_without_a_profile_a_quantised_model_decodes_plainly(llama: PreTrainedModel) -> None:
    llama.config.quantization_config = {}
    for layer in llama.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    assert uncalibrated_draft(llama) is None


def test_a_gain_that_is_not_clear_is_left(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfspec.drafts.LowPrecision, "cost", lambda *_: 0.7)
    assert wrap(llama, "auto").draft is None
