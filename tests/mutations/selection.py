"""Which tests an entry of the catalogue names, wherever below tests/ they are."""

from __future__ import annotations

import re
from pathlib import Path

from mutations.catalogue import Mutation

_TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)
_OF_NAME = re.compile(r"(?:(?P<file>test_\w+\.py)(?:::|$))?(?P<function>test_\w+)?(?P<parameters>\[.*\])?")


class SelectionError(Exception):
    """An entry names a test that is not there, or is there twice. The message names both and says what to do."""


class Suite:
    """The tests of a project, by function and by file."""

    def __init__(self, root: Path) -> None:
        files = sorted((root / "tests").rglob("test_*.py"))
        self._functions = {
            str(file.relative_to(root)): set(_TEST.findall(file.read_text(encoding="utf-8"))) for file in files
        }

    def arguments(self, mutation: Mutation) -> list[str]:
        """What pytest is to be given, in the root of the project, to run the tests that an entry names.

        Raises:
            SelectionError: a name is that of no test, or of several.
        """
        return [self._resolved(each, mutation) if each.startswith("test_") else each for each in mutation.tests]

    def _resolved(self, name: str, mutation: Mutation) -> str:
        parts = _OF_NAME.fullmatch(name)
        file, function = (parts["file"], parts["function"]) if parts else (None, name)
        found = [
            path
            for path, functions in self._functions.items()
            if (file is None or Path(path).name == file) and (function is None or function in functions)
        ]
        if len(found) != 1:
            where = f" ({', '.join(found)}): name the file too, as in test_file.py::{function}" if found else ""
            raise SelectionError(
                f"{mutation.name!r}: {len(found)} tests below tests/ are named {name}{where}. "
                "Correct `tests` of the entry."
            )
        return "::".join([found[0], *([f"{function}{parts['parameters'] or ''}"] if parts and function else [])])
