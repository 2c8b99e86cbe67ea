"""Whatever is wrong with a file of JSON is a typed error that names the file, and never a bare one of Python's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from selfspec import Profile
from selfspec.draft import EarlyExit, ExitHead, LayerSkip, ReducedVocabulary
from selfspec.draft.early_exit import FILE as EXIT_HEADS
from selfspec.draft.registry import parse_draft
from selfspec.errors import SelfSpecError
from selfspec.files.json_text import parse_json
from selfspec.measure.prompts import parse_workloads, read_prompts
from selfspec.model.checkpoint import read_config
from selfspec.tools.lab.runs import FILE, Runs
from selfspec.tools.lab.study import read_study
from selfspec.tools.train.corpus import read_documents
from selfspec.tools.train.course import RunFolder

NESTED = "[" * 100_000
BAD = {
    "nested": NESTED + "]" * 100_000,
    "nested and cut off": NESTED,
    "nested objects": '{"a":' * 100_000,
    "too many digits for int": '{"format": 1, "text": ' + "1" * 5000 + "}",
    "too many digits for float": '{"format": 1, "text": ' + "1" * 400 + "}",
    "half a character": '{"text": "\\ud800", "prompt": "\\ud800"}',
    "empty": "",
    "a string": '"text"',
    "null": "null",
}

READERS: dict[str, Callable[[Path], object]] = {
    "profile.json": Profile.load,
    "skip.json": LayerSkip.from_file,
    "vocabulary.json": lambda file: ReducedVocabulary.from_file(EarlyExit(1), file),
    EXIT_HEADS: lambda file: ExitHead.from_pretrained(file.parent),
    "config.json": lambda file: read_config(str(file.parent)),
    "prompts.jsonl": read_prompts,
    "workload.jsonl": lambda file: parse_workloads(f"name={file}"),
    "text.jsonl": read_documents,
    "run.json": lambda file: RunFolder(file.parent).begin({}),
    FILE: lambda file: Runs(file.parent),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_by_name(tmp_path: Path, name: str, bad: str) -> None:
    if name == FILE and not BAD[bad]:
        return  # No results yet is no mistake.
    file = tmp_path / name
    file.write_text(BAD[bad] + "\n" * bool(BAD[bad]))
    with pytest.raises(SelfSpecError) as refused:
        READERS[name](file)
    assert str(tmp_path) in str(refused.value)
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize(
    "text",
    [
        "models = " + NESTED,
        "texts = " + "1" * 5000,
        'models = "demo"\ntemperatures = [' + "1" * 400 + "]",
        'models = "demo"\ntemperatures = [nan]',
        'models = "demo"\ntemperatures = [inf]',
        'models = "demo"\nseeds = [' + "1" * 40 + "]",
        "models = 0x" + "f" * 5000,
    ],
    ids=lambda text: text[:30],
)
def test_studies_are_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(SelfSpecError, match=r"a\.toml"):
        read_study(tmp_path / "a.toml")


@pytest.mark.parametrize(
    "text",
    [
        "exit:" + "9" * 5000,
        "skip:layers=" + "9" * 5000,
        "skip:layers=1-" + "9" * 5000,
        "lookup+" * 5000 + "exit:4",
        "exit:4" + "+vocab:file" * 5000,
        "head:folder@" + "9" * 5000,
        "head:nul\0",
        "skip-file:nul\0",
        "exit:4+vocab:nul\0",
    ],
    ids=lambda text: text[:20],
)
def test_draft_names_are_refused(text: str) -> None:
    with pytest.raises(SelfSpecError):
        parse_draft(text)


def test_a_vocabulary_of_tokens_that_no_tensor_holds_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "vocabulary.json"
    file.write_text(json.dumps({"tokens": [1, 10**30]}))
    with pytest.raises(SelfSpecError, match="token ids"):
        ReducedVocabulary.from_file(EarlyExit(1), file)


def test_what_is_json_is_read_as_json() -> None:
    text = '{"a": [1, -2, 3.5, 1e30, 1000000000000000019884624838656], "b": "\\ud83d\\ude00 \\u00e9", "c": null}'
    # Digits in strings may be many.
    for each in (text, '{"a": "' + "1" * 400 + '", "b": 2}'):
        assert parse_json(each) == json.loads(each)


@pytest.mark.parametrize("text", ["1" * 400, '{"a": [1, -' + "9" * 301 + "]}"])
def test_integers_that_fit_no_float_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"integer of [34]0[01] digits"):
        parse_json(text)
