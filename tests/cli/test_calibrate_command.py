"""`selfspec calibrate` as a user meets it, and what `--draft auto` then does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from helpers.running import Invoke
from helpers.studies import calibrated
from selfspec import Profile
from selfspec.control.profile import VARIABLE

pandas = pytest.importorskip("pandas")

# As quick as it can be: one exit, one short prompt.
QUICK = ("--draft", "exit:3", "--max-new-tokens", "8", "--repeats", "1", "--longest-draft", "1", "--threads", "1")


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "profiles"))
    return tmp_path / "profiles"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Once upon a time"}\n{"text": "Tom had a big red ball."}\n')
    return file


@pytest.mark.tools
def test_a_profile_is_written_and_drafted_with(invoke: Invoke, folder: str, profiles: Path, prompts: Path) -> None:
    kept = profiles.parent / "kept"
    words: tuple[str, ...] = ("--prompt-file", str(prompts), "--keep", str(kept), "--output", "json")
    ending = invoke("calibrate", folder, *QUICK, *words)
    assert ending.status == 0, ending.stderr
    result = json.loads(ending.stdout)
    calls = pandas.read_parquet(kept / "calls.parquet")
    assert set(calls[calls["batch"] == 1]["prompt"]) == {0, 1}
    assert {each["name"] for each in result["report"]["greedy"]["confirmed"]} <= set(calls["draft"])
    assert (calls["new_tokens"] == 8 * calls["batch"]).all()
    file = Path(result["profile"])
    assert file.parent == profiles
    profile = Profile.load(file)
    assert result["greedy"]["draft"] == profile.greedy.draft
    assert result["setting"]["threads"] == 1
    assert result["report"]["settings"]["prompts"] == 2

    words = ("generate", folder, "--prompt", "Once", "--max-new-tokens", "12", "--threads", "1")
    auto = invoke(*words, "--draft", "auto", "--output", "json")
    plain = invoke(*words, "--output", "json")
    assert auto.status == plain.status == 0, auto.stderr
    assert json.loads(auto.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]
    assert json.loads(auto.stdout)["settings"]["draft"] == "auto"
    assert invoke(*words, "--draft", f"auto:{file}").status == 0
    verified = invoke("verify", folder, "--draft", "auto", "--threads", "1", "--samples", "100", "--output", "json")
    chosen = {profile.greedy.draft, profile.sampled.draft} - {"none"}
    if chosen:
        assert verified.status == 0, verified.stderr
        assert {each["draft"] for each in json.loads(verified.stdout)["drafts"]} == {"none", *chosen}
    else:
        assert verified.status == 2

    other = invoke(*words[:-1], "2", "--draft", "auto")
    assert other.status == 2
    assert "CPU threads 1 there, 2 here" in other.stderr
    assert "selfspec calibrate" in other.stderr


def test_tables_say_what_was_found(
    invoke: Invoke, folder: str, tmp_path: Path, stories: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "selfspec.tools.calibrate.calibration.calibrate", lambda *_given, **_options: calibrated(stories)
    )
    file = tmp_path / "mine.json"
    ending = invoke("calibrate", folder, "--to", str(file))
    assert ending.status == 0, ending.stderr
    for words in ("1.250", " 0.75 ", "1.38 at 3", "(1.00-1.50)", "(0.50-1.00)", "0.62", "2.50"):
        assert words in ending.stdout
    assert f"auto:{file}" in ending.stdout
    assert "Chosen: lookup+exit:2, 1.50 times as fast as plain decoding." in ending.stdout
    assert "No draft beat plain decoding here" in ending.stdout
    assert Profile.load(file).sampled.draft == "none"


def test_an_interrupt_writes_nothing(
    invoke: Invoke, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_given: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("selfspec.tools.calibrate.calibration.calibrate", interrupted)
    assert invoke("calibrate", folder, *QUICK, "--to", str(tmp_path / "mine.json")).status == 130
    assert list(tmp_path.iterdir()) == []


def test_auto_needs_no_profile_but_one_that_is_named_has_to_be_there(
    invoke: Invoke, folder: str, profiles: Path
) -> None:
    ending = invoke("generate", folder, "--prompt", "Once", "--max-new-tokens", "4", "--draft", "auto")
    assert ending.status == 0, ending.stderr
    missing = invoke("generate", folder, "--prompt", "Once", "--draft", f"auto:{profiles}/none.json")
    assert missing.status == 2
    assert "selfspec calibrate" in missing.stderr
