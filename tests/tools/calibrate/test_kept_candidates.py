"""What recycling learnt from the prompts of a calibration, kept beside its profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from helpers import tiny
from helpers.profiles import GREEDY, SAMPLED, profile_of
from selfspec.control.profile import Profile
from selfspec.draft import Recycling, Union
from selfspec.tools.calibrate.kept_candidates import with_candidates


def test_a_profile_that_chose_recycling_names_the_file(tmp_path: Path) -> None:
    model, file = tiny.llama(), tmp_path / "candidates"
    profile = profile_of(model, replace(GREEDY, draft="union:suffix+recycle+exit:2"), SAMPLED)
    kept = with_candidates(profile, model, [tiny.prompt(6)], file)
    assert kept.greedy.draft == f"union:suffix+recycle:{file}+exit:2"
    assert kept.sampled == SAMPLED
    kept.save(tmp_path / "profile.json")
    draft = Profile.load(tmp_path / "profile.json").choose_draft(greedy=True).draft
    assert isinstance(draft, Union)
    assert draft.sources[1] == Recycling.from_file(file)


def test_nothing_is_written_where_nothing_recycles(tmp_path: Path) -> None:
    model, file = tiny.llama(), tmp_path / "candidates"
    profile = profile_of(model)
    assert with_candidates(profile, model, [tiny.prompt(6)], file) is profile
    assert not file.exists()


def test_a_prompt_that_begins_with_the_padding_token_is_read_whole(tmp_path: Path) -> None:
    files = {pad: tmp_path / f"pad {pad}" for pad in (None, 7)}
    prompt = tiny.prompt(6)
    prompt[0, 0] = 7
    for pad, file in files.items():
        model = tiny.llama()
        model.generation_config.pad_token_id = pad
        with_candidates(profile_of(model, replace(GREEDY, draft="recycle"), SAMPLED), model, [prompt], file)
    assert files[None].read_bytes() == files[7].read_bytes()
