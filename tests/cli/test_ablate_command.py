"""`selfspec ablate` and `selfspec search`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.running import Invoke
from selfspec.measure.embedded import checkpoint_folder as demo_folder

pytest.importorskip("pandas")

_QUICK = ("--texts", "2", "--max-new-tokens", "12", "--pricing", "weights", "--device", "cpu")


@pytest.mark.tools
def test_a_study_by_options(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    words = ("ablate", "--model", folder, "--draft", "exits", "--confirm", "0", "--temperature", "0", *_QUICK)
    to = tmp_path / "study"
    ending = invoke(*words, "--to", str(to))
    assert ending.status == 0, ending.stderr
    assert "exit:4" in ending.stdout
    assert "0 failed" in ending.stdout
    names = {"runs.jsonl", "points.csv", "points.parquet", "report.html", "report.md", "pareto.png", "exits.svg"}
    assert names <= {file.name for file in to.iterdir()}
    again = invoke(*words, "--to", str(to), "--output", "json")
    found = json.loads(again.stdout)
    assert found["failed"] == []
    assert {row["temperature"] for row in found["best"]} == {0.0}


@pytest.mark.tools
def test_what_a_search_finds_drafts_for_its_model_alone(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ("search", folder, "--to", str(file), "--evaluations", "8", "--keep", str(tmp_path / "kept"), *_QUICK)
    ending = invoke(*words)
    assert ending.status == 0, ending.stderr
    assert "8 sets evaluated" in ending.stdout
    found = json.loads(invoke(*words, "--output", "json").stdout)
    assert found["evaluations"] == 8
    assert found["best"] == json.loads(file.read_text())["promises"]
    plain = ("generate", folder, "--prompt", "Once upon a time", "--max-new-tokens", "12")
    drafted = invoke(*plain, "--draft", f"skip-file:{file}")
    assert drafted.stdout == invoke(*plain).stdout
    other = invoke("generate", str(demo_folder()), "--prompt", "x", "--draft", f"skip-file:{file}")
    assert other.status == 2
    assert "is of another base" in other.stderr
