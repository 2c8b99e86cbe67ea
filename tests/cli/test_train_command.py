"""`selfspec train`, `export` and `pack`: what options change, and what is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from helpers import tiny
from helpers.snippets import Invoke, Said


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "story.txt"
    file.write_text("Once upon a time there was a dog who liked to play with a big red ball in the park. " * 20)
    return str(file)


@pytest.mark.tools
def test_a_vocabulary_is_counted_and_stays_exact(invoke: Invoke, folder: str, text: str, tmp_path: Path) -> None:
    file = str(tmp_path / "v.json")
    counted = invoke("train", "vocabulary", folder, "--text", text, "--to", file, "--size", "16", "--output", "json")
    assert json.loads(counted.stdout)["coverage"] == pytest.approx(0.6186, abs=1e-4)
    words = f"verify {folder} --draft exit:2+vocab:{file} --samples 100 --max-new-tokens 6 --output json"
    verified = invoke(*words.split())
    assert verified.status == 0, verified.stdout


def test_an_exported_checkpoint_is_not_written_over(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    to = tmp_path / "draft"
    assert invoke("export", folder, "--draft", "exit:2", "--to", str(to)).status == 0
    written, own = (AutoTokenizer.from_pretrained(place)("a dog").input_ids for place in (to, folder))
    assert written == own
    again = invoke("export", folder, "--draft", "skip:layers=1", "--to", str(to))
    assert again.status == 1
    assert "choose another place" in again.stderr
    over = invoke("export", folder, "--draft", "skip:layers=1", "--to", str(tmp_path / "other"), "--output", "json")
    assert json.loads(over.stdout)["layers"] == [0, 2, 3, 4]


def test_a_folder_is_packed(said: Said, tmp_path: Path) -> None:
    tiny.llama().bfloat16().save_pretrained(tmp_path / "model")
    found = said("pack", str(tmp_path / "model"), "--to", str(tmp_path / "packed"))
    assert found["packed"] > 0
    # Of a column whose width is no multiple of a block the rest is filled up.
    assert found["parts"]["upper"] == 2 * found["parts"]["lower"] > 0
