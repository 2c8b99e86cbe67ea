"""Runs code that a model wrote, with its test, in a process that can do little (see `guarded`)."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from selfspec.errors import BenchError

SECONDS = 10
"""The time that a program may take, by the processor and by the clock."""

MEMORY = 2**29
"""The bytes of address space that a program may take."""

# What follows a function at the left margin is no part of it (Chen et al., 2021).
_ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\n@", "\nassert ")


def check_system() -> None:
    """Refuse before work starts a system without limits for processes."""
    if os.name != "posix":
        raise BenchError("--run-code needs a POSIX system, to limit what code may take; leave it out")


def function_of(answer: str) -> str:
    """The part of an answer that continues a function: all up to the next statement without indentation."""
    ends = [place for end in _ENDS if (place := answer.find(end)) >= 0]
    return answer[: min(ends, default=len(answer))]


def passes(program: str) -> bool:
    """Whether a program runs to its end without an error, within its limits."""
    word = secrets.token_hex(16)
    given = f"{word}\n{SECONDS} {MEMORY}\n{program}"
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(Path(__file__).with_name("guarded.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(given.encode(errors="replace"), timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return False
        finally:
            # It is the first of a session, so nothing it began outlives it.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode == 0 and printed.strip() == word.encode()
