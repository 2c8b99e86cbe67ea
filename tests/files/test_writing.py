"""Where results go is checked before there are any, and what is written is whole or not there."""

from __future__ import annotations

import errno
import io
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from selfspec.errors import CheckpointError, StorageError
from selfspec.files.writing import check_output_file, check_output_folder, whole, whole_folder, write_json, writing


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with something in it."""
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


@pytest.mark.parametrize(
    "name", ["file.json", "file.json/below", "file.json/far/below", "x" * 300, "nul\0", "/dev/full/x"]
)
def test_what_can_be_no_folder_is_refused(tmp_path: Path, file: Path, name: str) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        check_output_folder(tmp_path / name)


@pytest.mark.parametrize("name", [".", "file.json/below.json", "x" * 300, "nul\0", "/dev/full", "/dev/null", "/"])
def test_what_can_be_no_file_is_refused(tmp_path: Path, file: Path, name: str) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        check_output_file(tmp_path / name)


def test_no_right_to_write_is_found_out(tmp_path: Path, file: Path) -> None:
    tmp_path.chmod(0o500)
    file.chmod(0o400)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write anywhere")
        for check, place in ((check_output_folder, tmp_path), (check_output_file, file)):
            with pytest.raises(StorageError, match="Permission denied"):
                check(place)
    finally:
        tmp_path.chmod(0o700)


def test_a_full_disk_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: open("/dev/full", "wb"))  # noqa: SIM115
    for check in (check_output_folder, check_output_file):
        with pytest.raises(StorageError, match="No space left"):
            check(tmp_path / "new")


def _full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path, file: Path) -> None:
    with whole(file) as draft:
        draft.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    said = r"file\.json cannot be written \(No space left on device\); all is kept"
    with pytest.raises(StorageError, match=said), whole(file, "all is kept") as draft:
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
    with pytest.raises(StorageError, match=r"file\.json cannot be written .*not JSON compliant.*; all is kept"):
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
        pytest.raises(StorageError, match=r"^place cannot be written \(.*\); kept$") as told,
        writing(Path("place"), "kept"),
    ):
        raise error
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("no"), CheckpointError("typed"), KeyError("x")]
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as same, writing(Path("place")):
        raise error
    assert same.value is error
