"""Commands say before they work that results cannot be written, in one line, and how long it is going to take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
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
    file = tmp_path / "story.txt"
    file.write_text("Once upon a time there was a dog who liked to play with a big red ball in the park. " * 20)
    return file


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
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


STUDY = "--texts 2 --prompt-tokens 6 --pricing weights --temperature 0 --device cpu"
VERIFIED = "verify {model} --draft exit:3 --prompt-file {prompts}"
CALIBRATED = "calibrate {model} --draft exit:3 --prompt-file {prompts} --nodes 0 --longest-draft 1 --to {to}"


def _done(invoke: Invoke, folder: str, tmp_path: Path, words: str, *where: str) -> dict[str, Any]:
    """What a command that is to end at once says that it did; how long it takes stands first on standard error."""
    prompts, study, to = (tmp_path / name for name in ("prompts.txt", "study.toml", "made"))
    prompts.write_text("Once upon a time\n")
    study.write_text(f'models = ["{folder}"]\ndrafts = ["exit:3"]\nconfirm = 3\n')
    typed = words.format(model=folder, prompts=prompts, study=study, to=to).split()
    ending = invoke(*typed, "--minutes", "0", "--output", "json")
    assert ending.status == 0, ending.stderr
    verb = {"verify": "verifying", "ablate": "studying", "search": "searching", "calibrate": "calibrating"}[typed[0]]
    first = ending.stderr.splitlines()[0]
    assert first.startswith(f"{verb}: about ")
    assert "a token takes" in first
    found: dict[str, Any] = json.loads(ending.stdout)
    for name in where:
        found = found[name]
    return found


@pytest.mark.tools
@pytest.mark.parametrize(
    ("words", "where", "expected"),
    [
        (VERIFIED, ["settings"], {"max_new_tokens": 16, "samples": 100}),
        (f"{VERIFIED} --samples 120", ["settings"], {"max_new_tokens": 16, "samples": 120}),
        (f"ablate {{study}} --to {{to}} {STUDY}", ["study"], {"max_new_tokens": 16, "reach": 1, "confirm": 3}),
        (f"search {{model}} --to {{to}} {STUDY} --evaluations 22", [], {"evaluations": 22}),
        (CALIBRATED, ["report", "settings"], {"max_new_tokens": 16, "repeats": 1, "longest_draft": 1}),
    ],
)
def test_where_time_is_short_less_is_done(
    invoke: Invoke, folder: str, tmp_path: Path, words: str, where: list[str], expected: dict[str, int]
) -> None:
    found = _done(invoke, folder, tmp_path, words, *where)
    assert {name: found[name] for name in expected} == expected


def test_a_search_in_no_time_tries_few_sets(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    assert _done(invoke, folder, tmp_path, f"search {{model}} --to {{to}} {STUDY}")["evaluations"] <= 20
