"""Commands that measure say beforehand how long it will take, and do less where that is too long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.running import Invoke

pytest.importorskip("pandas")

STUDY = ("--texts", "2", "--prompt-tokens", "6", "--pricing", "weights", "--temperature", "0", "--device", "cpu")


def said(invoke: Invoke, verb: str, *words: str) -> dict[str, Any]:
    """What a command prints as JSON; how long it takes stands on standard error."""
    ending = invoke(*words, "--output", "json")
    assert ending.status == 0, ending.stderr
    assert ending.stderr.startswith(f"{verb}: about ")
    assert "a token takes" in ending.stderr.splitlines()[0]
    found: dict[str, Any] = json.loads(ending.stdout)
    return found


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("Once upon a time\n")
    return file


@pytest.mark.tools
def test_verify(invoke: Invoke, folder: str, prompts: Path) -> None:
    words = ("verify", folder, "--draft", "exit:3", "--prompt-file", str(prompts), "--minutes", "0")
    settings = said(invoke, "verifying", *words)["settings"]
    assert (settings["max_new_tokens"], settings["samples"]) == (16, 100)
    settings = said(invoke, "verifying", *words, "--samples", "120")["settings"]
    assert (settings["max_new_tokens"], settings["samples"]) == (16, 120)


@pytest.mark.tools
def test_ablate(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    to = str(tmp_path / "study")
    words = ("ablate", "--model", folder, "--draft", "exit:3", "--to", to, "--max-new-tokens", "20", *STUDY)
    study = said(invoke, "studying", *words, "--minutes", "0")["study"]
    assert (study["max_new_tokens"], study["reach"], study["confirm"]) == (20, 1, 2)
    # It is continued as it was begun.
    again = said(invoke, "studying", *words, "--minutes", "0")
    assert again["study"] == study


@pytest.mark.tools
def test_ablate_by_a_file(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(f'models = ["{folder}"]\ndrafts = ["exit:3"]\nconfirm = 3\n')
    words = ("ablate", str(file), "--to", str(tmp_path / "study"), "--minutes", "0", *STUDY)
    study = said(invoke, "studying", *words)["study"]
    assert (study["max_new_tokens"], study["reach"], study["confirm"]) == (16, 1, 3)


def test_search(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    words = ("search", folder, "--to", str(tmp_path / "found.json"), "--minutes", "0", *STUDY)
    assert said(invoke, "searching", *words)["evaluations"] <= 20
    assert said(invoke, "searching", *words, "--evaluations", "22")["evaluations"] == 22


@pytest.mark.tools
def test_calibrate(invoke: Invoke, folder: str, tmp_path: Path, prompts: Path) -> None:
    words = ("calibrate", folder, "--draft", "exit:3", "--prompt-file", str(prompts), "--nodes", "0", "--minutes", "0")
    found = said(invoke, "calibrating", *words, "--longest-draft", "1", "--to", str(tmp_path / "profile.json"))
    settings = found["report"]["settings"]
    assert (settings["max_new_tokens"], settings["repeats"], settings["longest_draft"]) == (16, 1, 1)
