"""How tests run a command and what they see of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Ending:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


class Invoke(Protocol):
    """Runs `selfspec WORDS` with `stdin` piped in."""

    def __call__(self, *words: str, stdin: bytes = b"") -> Ending: ...
