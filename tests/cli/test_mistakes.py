"""Typical mistakes are answered by one clear line, those of places before any work; how long it takes is said first."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import tiny
from helpers.encoder_decoders import encoder_decoder
from helpers.json_schema import Failed
from helpers.snippets import Ending, Invoke
from selfspec.control.profile import VARIABLE

# What is typed after `selfspec`, by what it begins with, and a piece of the answer: `{tmp}` is a folder, `{text}` a
# file of text, `{stories}` a checkpoint of five layers.
COMMANDS = {
    "": {
        "generat demo": "Did you mean 'generate'",
        "generate demo --promt x": "--prompt",
        "generate demo --prompt": "requires an argument",
        "generate --prompt x": "name a model: a checkpoint folder, a hub name, or demo",
        "generate demo --prompt-file {tmp}/empty.txt": "is empty",
        "generate demo --prompt-file {tmp}/binary": "is not UTF-8",
        "generate demo --prompt x --prompt-file {text}": "give the prompt once",
        "generate ./nowhere --prompt x": "does not exist",
        "generate {tmp} --prompt x": "has no config.json",
        "generate {text} --prompt x": "is a file; give the folder",
        "inspect demo --output yaml": "--output",
        "inspect demo --memory much": "much",
        "inspect demo --context 100": "add --memory",
        "chat {stories}": "has no chat template",
        "chat {stories} --template {tmp}/none.jinja": "cannot be read",
        "calibrate {stories} --draft none": "name drafts alone",
        "calibrate {stories} --draft auto": "auto",
        "calibrate {stories} --temperature 0": "above 0",
        "calibrate {stories} --prompt-file {tmp}/none.txt": "none.txt cannot be read",
        "calibrate {stories} --prompt-file {tmp}/broken.jsonl": "line 1",
        "calibrate {stories} --device nowhere": "nowhere",
        "verify {stories} --prompt-file {tmp}/blank.txt": "holds no prompt",
        "verify {stories} --prompt-file {tmp}/binary": "is not UTF-8 text",
        "ablate": "there is nothing to study",
        "ablate {tmp}/no.toml": "no.toml cannot be read",
        "ablate --draft exits": "names no models",
        "ablate --model demo --workload x=none.jsonl": "none.jsonl",
        "search demo --sublayers few --to {tmp}/new": "--sublayers",
        "train layerskip demo --to {tmp}/new": "--text",
        "train layerskip demo --text no.txt --to {tmp}/new": "no.txt",
        "train layerskip demo --text {text} --to {tmp}/new --exits early": "--exits",
    },
    "generate demo --prompt x": {
        "--draft exti:4": "did you mean exit:4",
        "--draft exit:99": "choose 1..11",
        "--draft recycle+": "nothing comes before or behind a +",
        "--draft lookup+lookup": "name each draft once; got lookup and lookup",
        "--draft exit:2+int8": "here several do: exit:2 and int8",
        "--draft int8+window:0": "e.g. int8+window:512",
        "--draft mtp": "no module for multi-token prediction",
        "--draft medusa:nowhere": "no folder 'nowhere'",
        "--draft eagle": "write eagle:FOLDER",
        "--draft skip:layers=40": "40",
        "--draft skip-file:no.json": "no.json",
        "--draft auto:no.json": "selfspec calibrate",
        "--draft head:nowhere": "exit_head.safetensors",
        "--draft int4:no.safetensors": "write int4",
        "--nodes 8": "--nodes has no effect",
        "--draft exit:4 --nodes 0": "--nodes",
        "--draft exit:4 --nodes 5000": "at most 1024",
        "--draft exit:4 --draft-length 4 --nodes 3": "at least its length, 4",
        "--top-k 5": "--top-k has no effect",
        "--top-p 0.9": "add --temperature 1",
        "--temperature -1": "--temperature",
        "--temperature inf": "temperature=inf is not valid",
        "--temperature 1 --top-p 1.1": "--top-p",
        "--dtype int8": "'float32'",
        "--draft exit:4 --show-drafts": "FORCE_COLOR",
        "--draft exit:2 --draft-length 0": "--draft-length",
        "--draft skip:layers=0-11": "skip fewer layers",
        "--max-new-tokens 2100": "context of 2048",
        "--max-new-tokens ten": "--max-new-tokens",
        "--device cuda:99": "choose cpu",
        "--threads 0": "--threads",
        "--threads 9999": "give at most as many",
        "--repetition-penalty 0": "repetition_penalty=0.0 is not valid",
        "--no-repeat-ngram-size -1": "--no-repeat-ngram-size",
        "--stop-string ''": "stop_strings=[''] is not valid",
        "--accept no-such-rule": "no acceptance rule 'no-such-rule'",
        "--context 9": "add --memory",
        "--memory 6": "'6' is no size",
        "--memory 1KiB": "too little",
        "--memory 6GiB --draft auto": "name another --draft",
        "--memory 6GiB --context 9": "raise context to",
    },
    "serve {stories} --port 0": {
        "--api-key ''": "--api-key is empty",
        "--max-body much": "--max-body",
        "--cache 0GiB": "--cache",
        "--host not.a.host.invalid": "--host",
    },
    "export {stories} --to {tmp}/new": {
        "--draft auto": "a choice among drafts",
        "--draft exit:99": "out of range",
    },
    "demo": {
        "--draft none": "give --draft exit:4",
        "--draft exit:12": "choose 1..11",
        "--seconds -1": "--seconds",
        "--seconds inf": "--seconds",
        "--max-new-tokens 1": "--max-new-tokens",
    },
    "bench {stories} --to {tmp}/new": {
        "--draft none": "give --draft exit:E",
        "--device cpu --runtime graphs": "CudaGraphs runs models on a CUDA device",
        "--memory 64GiB --measure costs": "drop it",
        "--memory 64GiB --draft int8 --draft int4": "in one format, not in",
        "--context 8 --chat": "drop one",
        "--measure acceptance --measure costs": "times nothing",
        "--workload nonsense": "write NAME=FILE",
        "--workload a=no.jsonl": "no.jsonl",
        "--context 600": "context of 512",
        "--max-new-tokens 4": "--max-new-tokens",
        "--arm lookup --draft int8": "are for --arm draft",
        "--arm lookup --nodes 8": "add it, or drop them",
    },
    "verify {stories} --max-new-tokens 8 --samples 100": {
        "--draft none": "plain decoding is always verified",
        "--draft skip:attn=1 --draft skip:attn=1": "named more than once",
        "--accept tokn": "choose one of block, token",
        "--accept token --accept token": "name each acceptance rule once",
        "--samples 10": "--samples",
        "--seed -1": "from 0 to 2**63 - 1",
        "--memory 64GiB --draft int4 --draft int8": "in one format, not in int4 and int8",
        "--memory 64GiB --draft auto": "name another --draft",
    },
    "train layerskip {stories} --text {text} --to {tmp}/new": {
        "--exits '2;3'": "--exits",
        "--learning-rate 0": "learning rate",
    },
}
TYPED = {f"{begun} {rest}".strip(): answer for begun, each in COMMANDS.items() for rest, answer in each.items()}


@pytest.mark.parametrize(("typed", "answer"), TYPED.items(), ids=TYPED)
def test_on_the_command_line(
    invoke: Invoke, folder: str, tmp_path: Path, typed: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if typed.startswith("calibrate") and "--chat" not in typed:
        monkeypatch.setattr("selfspec.measure.checkpoint.load_checkpoint", lambda *_: pytest.fail("weights were read"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.jsonl").write_text('{"other": "x"}\n')
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time there was a dog. " * 20)
    ending = invoke(*(word.format(tmp=tmp_path, text=text, stories=folder) for word in shlex.split(typed)))
    assert (ending.status, ending.stdout) == (2, "")
    *before, said = ending.stderr.splitlines()
    # How long it will take is said before.
    assert all(line.startswith("verifying: ") for line in before)
    assert said.startswith("error: ")
    assert answer in said
    assert len(said.split()) < 70
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("typed", "kind"),
    [
        ("inspect {tmp}/none", "CheckpointError"),
        ("verify {stories} --prompt-file {tmp}/none", "PromptError"),
        ("generate {stories} --prompt x --draft skip:attn=7", "DraftConfigError"),
        ("generate {stories} --prompt x --prompt-file other.txt", "PromptError"),
        ("generate {stories} --prompt x --top-p 0.9", "UnsupportedOptionError"),
        ("generate {stories} --prompt x --dtype int8", "BadParameter"),
        ("generate {stories} --prompt x --no-such-option", "NoSuchOption"),
    ],
)
def test_json_names_the_kind(invoke: Invoke, folder: str, tmp_path: Path, typed: str, kind: str) -> None:
    ending = invoke(*typed.format(tmp=tmp_path, stories=folder).split(), "--output", "json")
    assert ending.status == 2
    assert Failed.model_validate_json(ending.stdout, strict=True).error.type == kind
    assert ending.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    "words",
    [
        "calibrate",
        "verify",
        "serve --port 0",
        "train head --text {tmp}/text --to {tmp}/new",
        "bench --to {tmp}/new",
        "export --draft exit:1 --to {tmp}/new",
        "ablate --draft exits --to {tmp}/new --model",
        "search --to {tmp}/new",
    ],
)
def test_a_model_with_an_encoder_is_refused_where_decoders_read_texts(
    invoke: Invoke, tmp_path: Path, words: str
) -> None:
    folder = str(tmp_path / "model")
    encoder_decoder("bart", torch.float32, vocab_size=256).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    (tmp_path / "text").write_text("Once upon a time there was a fox. " * 400, encoding="utf-8")
    ending = invoke(*shlex.split(words.format(tmp=tmp_path)), folder)
    assert ending.status == 2
    assert "has an encoder" in ending.stderr
    assert "docs/speech.md" in ending.stderr or "wrap(model, draft)" in ending.stderr


pytest.importorskip("pandas")

# What writes a folder, and what writes a file.
FOLDERS = [
    *(f"train {recipe} {{model}} --text {{text}}" for recipe in ("layerskip", "exit", "head")),
    *("bench {model}", "ablate --model {model}", "export {model} --draft exit:1"),
]
FILES = [
    *("train vocabulary {model} --text {text} --size 8", "calibrate {model}", "search {model}"),
]


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
    monkeypatch.setattr("selfspec.measure.checkpoint.load_whole", load)


def _refused(ending: Ending) -> None:
    assert ending.status == 1, ending.stderr
    (line,) = ending.stderr.splitlines()
    assert line.startswith("error: ")
    assert "cannot be written" in line


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("words", [*FOLDERS, *FILES])
def test_a_place_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    invoke: Invoke, folder: str, text: Path, tmp_path: Path, words: str
) -> None:
    typed = words.format(model=folder, text=text).split()
    for place in (str(text / "below"), *(["/dev/full"] if words in FILES else [])):
        _refused(invoke(*typed, "--to", place))
    ending = invoke(*typed, "--to", str(text / "below"), "--output", "json")
    assert json.loads(ending.stdout)["error"]["type"] == "StorageError"
    assert [path.name for path in tmp_path.iterdir()] == ["story.txt"]


@pytest.mark.usefixtures("idle")
def test_further_places_are_checked_too(
    invoke: Invoke, folder: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = invoke("search", folder, "--to", str(tmp_path / "skip.json"), "--keep", str(text))
    assert ending.status == 2
    assert "is a file; give a folder" in ending.stderr
    ending = invoke("calibrate", folder, "--keep", str(text))
    assert ending.status == 2
    assert "is a file; give a folder" in ending.stderr
    monkeypatch.setenv(VARIABLE, str(text / "profiles"))
    _refused(invoke("calibrate", folder))
    results = tmp_path / "results"
    (results / "runs.jsonl").mkdir(parents=True)
    _refused(invoke("bench", folder, "--to", str(results)))
