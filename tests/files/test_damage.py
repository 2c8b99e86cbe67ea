"""Files that selfspec writes and reads: damaged ones, JSON that is none, and places that cannot be written.

What is read is what was written, or a typed error that names the file; what is written is whole or not there.
"""

from __future__ import annotations

import errno
import io
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from helpers import tiny
from helpers.saved_folders import rewrite
from helpers.studies import profile_of
from selfspec import Profile, errors
from selfspec.draft import EarlyExit, ExitHead, LayerSkip, ReducedVocabulary
from selfspec.draft.early_exit import FILE as EXIT_HEADS
from selfspec.draft.layer_skip import write_skip_file
from selfspec.files.json_text import parse_json
from selfspec.files.writing import (
    check_output_file,
    check_output_folder,
    whole,
    whole_folder,
    write_json,
    write_sealed,
    writing,
)
from selfspec.measure.prompts import parse_workloads, read_prompts
from selfspec.model.checkpoint import read_config
from selfspec.model.identity import fingerprint
from selfspec.tools.lab.runs import FILE as RUNS
from selfspec.tools.lab.runs import Run, Runs
from selfspec.tools.train.corpus import read_documents, written_text
from selfspec.tools.train.lesson import ExitHeads
from selfspec.tools.train.recipe import Course, Texts
from selfspec.tools.train.run import RunFolder


@cache
def _model() -> PreTrainedModel:
    """Large enough for the kernels of fewer bits."""
    return tiny.llama(hidden_size=64, intermediate_size=64, num_hidden_layers=2, dtype=torch.float32)


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: of the file within its folder.
        write: writes it.
        read: all of it that has a meaning, as something that can be compared.
        error: of a file that is damaged.
    """

    name: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    error: type[errors.SelfSpecError]

    def make(self, folder: Path) -> Path:
        self.write(folder / self.name)
        return folder / self.name


def _values(tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    return {name: (values.dtype, values.tolist()) for name, values in tensors.items()}


def _write_exit_head(file: Path) -> None:
    head = ExitHeads(64, 2, (1, 2), torch.arange(0, 50, 2))
    head.save(file.parent, torch.float32, fingerprint(_model()), 2, {"alpha_2": 0.5})


def _read_exit_head(file: Path) -> object:
    head = ExitHead.from_pretrained(file.parent)
    assert isinstance(head.draft_head.adapter, torch.nn.Module)
    assert head.draft_head.tokens is not None
    return head.layer, head.base, head.draft_head.tokens.tolist(), _values(head.draft_head.adapter.state_dict())


def _write_skip_set(file: Path) -> None:
    write_skip_file(LayerSkip(attention=[1], mlp=[0, 1]), fingerprint(_model()), file, {"alpha": 0.5})


def _read_profile(file: Path) -> object:
    found = Profile.load(file)
    return found, found.report


def _read_run(file: Path) -> object:
    found = Runs(file.parent).measured("costs")
    if not found:
        raise errors.BenchError("a line that was cut off is no run, and what it held is measured again")
    return found


def _read_training(file: Path) -> object:
    RunFolder(file.parent).begin({"rate": 0.25, "steps": 12})
    return json.loads(file.read_text())["settings"]


KINDS: dict[str, Kind] = {
    "exit head": Kind(EXIT_HEADS, _write_exit_head, _read_exit_head, errors.ExitHeadError),
    "skip set": Kind("skip.json", _write_skip_set, LayerSkip.from_file, errors.DraftConfigError),
    "vocabulary": Kind(
        "vocabulary.json",
        lambda file: write_sealed(file, {"coverage": 0.5, "tokens": [1, 2, 3, 5, 8, 13]}),
        lambda file: ReducedVocabulary.from_file(EarlyExit(1), file).tokens,
        errors.DraftConfigError,
    ),
    "profile": Kind("profile.json", lambda file: profile_of(_model()).save(file), _read_profile, errors.ProfileError),
    "run": Kind(
        RUNS,
        lambda file: Runs(file.parent).keep(Run("costs", {"threads": 2}).rows([{"seconds": 0.25}], {})),
        _read_run,
        errors.BenchError,
    ),
    "training": Kind(
        "run.json",
        lambda file: RunFolder(file.parent).begin({"rate": 0.25, "steps": 12}),
        _read_training,
        errors.TrainingError,
    ),
}
OF_TENSORS = ("exit head",)
FLIPS = (0x01, 0x10, 0x80)


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_which_bytes_are_flipped_or_missing_is_refused(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    file = kind.make(tmp_path)
    content, wanted = file.read_bytes(), kind.read(file)
    places = sorted({*range(0, len(content), len(content) // 50 + 1), *range(0, min(len(content), 400), 7)})
    damaged = [
        content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :]
        for number, place in enumerate(places)
        for flip in FLIPS[number % 3 : number % 3 + 1]
    ]
    # A quarter of which every seventh byte is another.
    for quarter in range(4):
        some = bytearray(content)
        for place in range(quarter * len(content) // 4, (quarter + 1) * len(content) // 4, 7):
            some[place] ^= 1
        damaged.append(bytes(some))
    damaged += [content[: len(content) * tenth // 10] for tenth in range(10)]
    damaged.append(content[:-1] if name in OF_TENSORS else b"{")
    refused = 0
    for each in damaged:
        file.write_bytes(each)
        try:
            found = kind.read(file)
        except kind.error:
            refused += 1
            continue
        # What has no meaning may change: a space, the name under which the checksum is.
        assert found == wanted
    assert refused >= 0.8 * len(damaged)


def _replace(wanted: dict[str, Any], known: dict[str, Any], _: object) -> None:
    known.clear()
    known.update(wanted)


@pytest.mark.parametrize("name", OF_TENSORS)
def test_a_file_with_tensors_that_are_missing_or_too_many_is_refused(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    file = kind.make(tmp_path)
    content = file.read_bytes()
    with safe_open(file, framework="pt") as opened:
        said = opened.metadata()
        tensors: dict[str, Any] = {each: opened.get_tensor(each) for each in opened.keys()}  # noqa: SIM118
    first, last = min(tensors), max(tensors)
    changed: list[dict[str, Any]] = [
        {each: values for each, values in tensors.items() if each != first},
        {each: values for each, values in tensors.items() if each != last},
        {**tensors, "more": tensors[first] * 1},
        {**tensors, f"{first}.more": tensors[first] * 1},
        {**tensors, last: tensors[last][:-1]},
        {**tensors, last: tensors[last].reshape(1, *tensors[last].shape)},
    ]
    for each in changed:
        save_file(each, file, said)
        with pytest.raises(kind.error):
            kind.read(file)
    if name == "exit head":
        return
    # With checksums that fit, by another writer.
    for each in (changed[2], changed[3], changed[4], changed[5]):
        file.write_bytes(content)
        rewrite(file, partial(_replace, each))
        with pytest.raises(kind.error):
            kind.read(file)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in (*OF_TENSORS, "run")])
def test_people_may_write_and_change_what_is_text(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    file = kind.make(tmp_path)
    wanted = kind.read(file)
    content = json.loads(file.read_text())
    del content["checksum"]
    file.write_text(json.dumps(content, indent=4))
    assert kind.read(file) == wanted


def test_text_of_its_own_that_a_training_kept(tmp_path: Path) -> None:
    model, beginnings = _model(), tiny.prompt(2, 4).tolist()
    course, texts = Course(length=8), Texts(text=[], held_out_blocks=1)
    kept = tmp_path / "own.safetensors"
    wanted = written_text(model, beginnings, course, texts, kept)
    assert torch.equal(written_text(model, beginnings, course, texts, kept).train.ids, wanted.train.ids)
    content = kept.read_bytes()
    for place in range(0, len(content), 5):
        kept.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises((errors.TrainingError, errors.CorpusError)):
            written_text(model, beginnings, course, texts, kept)


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
    RUNS: lambda file: Runs(file.parent),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_by_name(tmp_path: Path, name: str, bad: str) -> None:
    if name == RUNS and not BAD[bad]:
        return  # No results yet is no mistake.
    file = tmp_path / name
    file.write_text(BAD[bad] + "\n" * bool(BAD[bad]))
    with pytest.raises(errors.SelfSpecError) as refused:
        READERS[name](file)
    assert str(tmp_path) in str(refused.value)
    assert len(str(refused.value)) < 2000


def test_what_is_json_is_read_as_json() -> None:
    text = '{"a": [1, -2, 3.5, 1e30, 1000000000000000019884624838656], "b": "\\ud83d\\ude00 \\u00e9", "c": null}'
    # Digits in strings may be many.
    for each in (text, '{"a": "' + "1" * 400 + '", "b": 2}'):
        assert parse_json(each) == json.loads(each)
    # Integers that fit no float are refused.
    for each in ("1" * 400, '{"a": [1, -' + "9" * 301 + "]}"):
        with pytest.raises(ValueError, match=r"integer of [34]0[01] digits"):
            parse_json(each)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "file.json"
    file.write_text("old")
    return file


def test_a_good_place_is_left_as_it_was(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "not" / "yet" / "there", Path("new")):
        check_output_folder(folder)
    for place in (file, tmp_path / "not" / "yet" / "there.json", Path("new.json")):
        check_output_file(place)
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
    assert file.read_text() == "old"


NO_FOLDERS = ("file.json", "file.json/below", "file.json/far/below", "x" * 300, "nul\0", "/dev/full/x")
NO_FILES = (".", "file.json/below.json", "x" * 300, "nul\0", "/dev/full", "/dev/null", "/")


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize(
    ("check", "name"),
    [*((check_output_folder, name) for name in NO_FOLDERS), *((check_output_file, name) for name in NO_FILES)],
)
def test_what_can_be_no_output_is_refused(tmp_path: Path, check: Callable[[Path], object], name: str) -> None:
    with pytest.raises(errors.StorageError, match="cannot be written"):
        check(tmp_path / name)


def test_no_right_to_write_is_found_out(tmp_path: Path, file: Path) -> None:
    tmp_path.chmod(0o500)
    file.chmod(0o400)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write anywhere")
        for check, place in ((check_output_folder, tmp_path), (check_output_file, file)):
            with pytest.raises(errors.StorageError, match="Permission denied"):
                check(place)
    finally:
        tmp_path.chmod(0o700)


def test_a_full_disk_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: open("/dev/full", "wb"))  # noqa: SIM115
    for check in (check_output_folder, check_output_file):
        with pytest.raises(errors.StorageError, match="No space left"):
            check(tmp_path / "new")


def _full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path, file: Path) -> None:
    with whole(file) as draft:
        draft.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    said = r"file\.json cannot be written \(No space left on device\); all is kept"
    with pytest.raises(errors.StorageError, match=said), whole(file, "all is kept") as draft:
        _full(draft.write_text("half"))
    assert file.read_text() == "new"
    with pytest.raises(ZeroDivisionError), whole(file) as draft:
        draft.write_text(str(1 / 0))
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
    with whole(tmp_path / "new" / "folder" / "file") as draft:
        draft.write_text("made")
    assert (tmp_path / "new" / "folder" / "file").read_text() == "made"


def test_files_have_the_rights_of_new_ones(tmp_path: Path) -> None:
    (tmp_path / "new").touch()
    wanted = (tmp_path / "new").stat().st_mode
    assert wanted & 0o044
    with whole(tmp_path / "file.safetensors") as draft:
        save_file({"a": torch.zeros(1)}, draft)
    with whole_folder(tmp_path / "folder") as draft:
        (draft / "inside").mkdir()
        for file in (draft / "a.safetensors", draft / "inside" / "b.safetensors"):
            save_file({"a": torch.zeros(1)}, file)
            file.chmod(0o600)
    assert {each.stat().st_mode for each in tmp_path.rglob("*") if each.is_file()} == {wanted}


def test_what_is_no_number_is_not_written_as_json(tmp_path: Path, file: Path) -> None:
    write_json(file, {"a": 1.5})
    with pytest.raises(errors.StorageError, match=r"file\.json cannot be written .*not JSON compliant.*; all is kept"):
        write_json(file, {"a": float("nan")}, "all is kept")
    assert json.loads(file.read_text()) == {"a": 1.5}
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        io.UnsupportedOperation("not writable"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 2055360 vs 2055248"),
        RuntimeError("basic_ios::clear: iostream error"),
    ],
    ids=repr,
)
def test_what_writers_raise_is_reported_in_one_line(error: Exception) -> None:
    with (
        pytest.raises(errors.StorageError, match=r"^place cannot be written \(.*\); kept$") as told,
        writing(Path("place"), "kept"),
    ):
        raise error
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("no"), errors.CheckpointError("typed"), KeyError("x")]
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as same, writing(Path("place")):
        raise error
    assert same.value is error
