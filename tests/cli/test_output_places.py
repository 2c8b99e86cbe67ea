"""Every command finds out that it cannot write its results before it works for them, and says so in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.running import Ending, Invoke
from selfspec.control.profile import VARIABLE

pytest.importorskip("pandas")

MODEL = "MODEL"
TEXT = "TEXT"
COMMANDS = {
    "train layerskip": ("train", "layerskip", MODEL, "--text", TEXT),
    "train plain": ("train", "plain", MODEL, "--text", TEXT),
    "train exit": ("train", "exit", MODEL, "--text", TEXT),
    "train head": ("train", "head", MODEL, "--kind", "eagle3", "--text", TEXT),
    "train average": ("train", "average", MODEL, MODEL),
    "train vocabulary": ("train", "vocabulary", MODEL, "--text", TEXT, "--size", "8"),
    "bench": ("bench", MODEL),
    "calibrate": ("calibrate", MODEL),
    "ablate": ("ablate", "--model", MODEL),
    "search": ("search", MODEL),
    "quantize": ("quantize", MODEL),
    "index": ("index", MODEL, "--text", TEXT),
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A little story."""
    file = tmp_path / "story.txt"
    file.write_text("Once upon a time there was a dog who liked to play with a big red ball in the park. " * 20)
    return file


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is loaded."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded before the output was checked")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)


def _refused(ending: Ending) -> None:
    assert ending.status == 1, ending.stderr
    (line,) = ending.stderr.splitlines()
    assert line.startswith("error: ")
    assert "cannot be written" in line


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("place", ["story.txt/below", "story.txt/far/below", "x" * 300])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    invoke: Invoke, folder: str, text: Path, tmp_path: Path, command: str, place: str
) -> None:
    words = [{MODEL: folder, TEXT: str(text)}.get(word, word) for word in COMMANDS[command]]
    _refused(invoke(*words, "--to", str(tmp_path / place)))
    ending = invoke(*words, "--to", str(tmp_path / place), "--output", "json")
    assert json.loads(ending.stdout)["error"]["type"] == "StorageError"
    assert [path.name for path in tmp_path.iterdir()] == ["story.txt"]


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("command", ["train vocabulary", "calibrate", "search", "quantize", "index"])
def test_a_folder_or_a_device_is_no_file(invoke: Invoke, folder: str, text: Path, tmp_path: Path, command: str) -> None:
    words = [{MODEL: folder, TEXT: str(text)}.get(word, word) for word in COMMANDS[command]]
    for place in ("/dev/full", *([] if command == "train vocabulary" else [str(tmp_path)])):
        ending = invoke(*words, "--to", place)
        assert ending.status == 1
        assert len(ending.stderr.splitlines()) == 1


@pytest.mark.usefixtures("idle")
def test_further_places_are_checked_too(
    invoke: Invoke, folder: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refused(invoke("search", folder, "--to", str(tmp_path / "skip.json"), "--keep", str(text)))
    monkeypatch.setenv(VARIABLE, str(text / "profiles"))
    _refused(invoke("calibrate", folder))
    results = tmp_path / "results"
    (results / "runs.jsonl").mkdir(parents=True)
    _refused(invoke("bench", folder, "--to", str(results)))


@pytest.mark.tools
def test_a_training_on_a_full_disk_ends_in_one_line_and_goes_on_later(
    invoke: Invoke, folder: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"train layerskip {folder} --text {text} --to {tmp_path / 'model'} --exits 2,3 --steps 4".split()
    words += ["--save-every", "2", "--batch", "2", "--length", "16", "--held-out-blocks", "2"]
    words += ["--check-seconds", "0", "--device", "cpu", "--output", "json"]

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 2055360 vs 2055248")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        ending = invoke(*words)
    assert ending.status == 1
    assert json.loads(ending.stdout)["error"]["type"] == "StorageError"
    last = ending.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "repeat the command to go on" in last
    assert "Traceback" not in ending.stderr
    assert "step 4/4" not in ending.stderr
    assert invoke(*words).status == 0
