"""`selfspec train`, `quantize`, `index` and `export`: what options change, and what is counted."""

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


def test_a_vocabulary_is_counted_and_stays_exact(invoke: Invoke, folder: str, text: str, tmp_path: Path) -> None:
    file = str(tmp_path / "v.json")
    counted = invoke("train", "vocabulary", folder, "--text", text, "--to", file, "--size", "16", "--output", "json")
    assert json.loads(counted.stdout)["coverage"] == pytest.approx(0.6186, abs=1e-4)
    words = f"verify {folder} --draft exit:2+vocab:{file} --samples 100 --max-new-tokens 6 --output json"
    verified = invoke(*words.split())
    assert verified.status == 0, verified.stdout


TEXT = "Once upon a time, there was a little girl named Lily.\n"


@pytest.mark.tools
def test_prompts_and_seeds_change_what_errors_are_compensated_on(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\nThe dog\n")
    one = ("--texts", "1")
    ways = (one, one, (*one, "--seed", "1"), (*one, "--prompt-file", str(prompts)), ("--texts", "0"))
    written = []
    for number, words in enumerate(ways):
        file = tmp_path / str(number)
        assert invoke("quantize", folder, "--bits", "4", "--to", str(file), *words).status == 0
        written.append(file.read_bytes())
    assert written[0] == written[1]
    assert len(set(written)) == 4


def test_json_of_weights_in_fewer_bits(said: Said, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "made.safetensors"
    found = said("quantize", folder, "--to", str(file))
    assert found.pop("seconds") > 0
    assert "selfspec" in found.pop("versions")
    assert 0.2 < found.pop("share") < 0.3
    assert found == {"schema_version": 1, "file": str(file), "bytes": file.stat().st_size, "bits": 8, "format": "int8"}


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
