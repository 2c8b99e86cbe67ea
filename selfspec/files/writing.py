"""Check the places of outputs before work begins, and write files and folders whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from selfspec.errors import SelfSpecError, StorageError

CHECKSUM = "checksum"
"""Field of a JSON file with the checksum of all others."""


# Parts of torch's messages, in a bare RuntimeError, if its file could not be written.
_TORCH_WORDS = ("PytorchStreamWriter", "inline_container", "iostream error")


def check_output_folder(folder: Path) -> None:
    """Refuse a folder, or its nearest existing parent, that cannot be written to. Nothing is left there."""
    with writing(folder):
        there = folder.absolute()
        while not exists(there):
            there = there.parent
        # Raises at once if `there` is a file or cannot be written to.
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"\0")


def check_output_file(file: Path) -> None:
    """Refuse a file that cannot be written to, before there are results. Its content does not change."""
    with writing(file):
        if exists(file):
            if not file.is_file():
                raise StorageError(f"{file} cannot be written (it is {'a folder' if file.is_dir() else 'no file'})")
            file.open("r+b").close()
    check_output_folder(file.parent)


def check_new(place: Path, remedy: str) -> None:
    """Refuse a place that holds a file or a folder that is not empty."""
    with writing(place):
        if exists(place) and not (place.is_dir() and not any(place.iterdir())):
            raise StorageError(f"{place} is there already; {remedy}")


@contextmanager
def whole(file: Path, kept: str = "") -> Iterator[Path]:
    """Yield a path whose file replaces `file` at once on success, and is deleted on failure; make its folders."""
    draft = file.parent / f".{uuid.uuid4().hex}{file.suffix}"
    with writing(file, kept):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield draft
            draft.chmod(mode_of_new_files(file.parent))
            os.replace(draft, file)
        finally:
            draft.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that on success becomes `folder`, which is empty or not there; else it is deleted."""
    place = folder.absolute()
    draft = place.parent / f".{place.name}.{uuid.uuid4().hex}"
    with writing(folder):
        place.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        try:
            yield draft
            mode = mode_of_new_files(draft)
            for each in filter(Path.is_file, draft.rglob("*")):
                each.chmod(mode)
            if exists(place):
                place.rmdir()
            draft.replace(place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def mode_of_new_files(folder: Path) -> int:
    """Return the mode of a new file in a folder; some writers give access to their user alone."""
    probe = folder / f".{uuid.uuid4().hex}"
    probe.touch()
    try:
        return probe.stat().st_mode
    finally:
        probe.unlink()


@contextmanager
def writing(place: Path, kept: str = "") -> Iterator[None]:
    """Turn errors of a full disk or a missing permission into one line; `kept` says what is not lost."""
    try:
        yield
    except SelfSpecError:
        raise
    # ValueError: a name that no file can have.
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        is_known = any(words in str(error) for words in (*_TORCH_WORDS, "embedded null", "not JSON compliant"))
        if not is_known and not isinstance(error, OSError | SafetensorError):
            raise
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise StorageError(f"{place} cannot be written ({reason})" + (f"; {kept}" if kept else "")) from error


def write_json(file: Path, content: Mapping[str, Any], kept: str = "") -> None:
    """Write an object as JSON: the whole file or none of it. Arguments and errors are those of `whole`."""
    with whole(file, kept) as draft:
        draft.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_sealed(file: Path, content: Mapping[str, Any], kept: str = "") -> None:
    """Write JSON as `write_json` does, with a checksum by which `read_json` detects damage."""
    with writing(file, kept):
        whole_content = sealed(content)
    write_json(file, whole_content, kept)


def exists(place: Path) -> bool:
    """Return whether a path exists; unlike `Path.exists`, raise if the system does not tell."""
    try:
        place.stat()
    except FileNotFoundError:
        return False
    return True


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON file with a checksum, by which `parsed` detects changes."""
    kept = {name: value for name, value in content.items() if name != CHECKSUM}
    # Take the content as it will be read: JSON has other types than Python.
    read = json.loads(json.dumps(kept, allow_nan=False))
    text = json.dumps(read, sort_keys=True)
    return {**read, CHECKSUM: hashlib.sha256(text.encode()).hexdigest()}
