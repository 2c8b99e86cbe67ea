"""Writing a file whole, so that readers, and other workers writing the same, see the old one or the new one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """A place to write to, which becomes the file when all went well and is gone when not."""
    draft = file.with_name(f".{uuid.uuid4().hex}{file.suffix}")
    try:
        yield draft
        os.replace(draft, file)
    finally:
        draft.unlink(missing_ok=True)
