"""Check the files and folders that a tool will write before its work begins, and write folders whole."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selfspec.errors import StorageError
from selfspec.files.writing import check_output_folder, exists, mode_of_new_files, writing


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
