"""How a command ends when it does not end well: what is printed where, and the exit status."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import typer

from selfspec.cli.json_output import print_json
from selfspec.errors import NonFiniteLogitsError, SelfSpecError, StorageError

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


class FailedRunError(Exception):
    """A run that failed or was interrupted after it had results.

    Attributes:
        cause: what ended it.
        result: what a whole run would have printed as JSON, as far as it came.
    """

    def __init__(self, cause: BaseException, result: Mapping[str, Any]) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.result = result


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, as far as can be told when it could not be parsed."""
    return "--output=json" in words or ("--output", "json") in pairwise(words)


def status_of(error: BaseException) -> int:
    """The exit status of a command that `error` ended."""
    if isinstance(error, FailedRunError):
        return status_of(error.cause)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, NonFiniteLogitsError | StorageError):
        return FAILED
    if isinstance(error, SelfSpecError):
        return BAD_INPUT
    return error.exit_code if isinstance(error, typer.TyperException) else FAILED


def report(error: BaseException, as_json: bool) -> None:
    """Say what ended a command: a line on stderr and, where JSON was asked for, an object with `error` on stdout."""
    cause = error.cause if isinstance(error, FailedRunError) else error
    result = error.result if isinstance(error, FailedRunError) else {}
    message = _message(cause)
    if as_json:
        print_json({**result, "error": {"type": type(cause).__name__, "message": message}})
    # Without any words typer shows the help and has nothing to say.
    if message:
        print(message if isinstance(cause, KeyboardInterrupt) else f"error: {message}", file=sys.stderr)


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, typer.TyperException):
        return error.format_message()
    if isinstance(error, SelfSpecError):
        return str(error)
    if type(error).__name__ == "OutOfMemoryError":
        return f"out of memory ({str(error).splitlines()[0]}); try --dtype bfloat16, fewer new tokens or --device cpu"
    # Anything else is a mistake of ours, and whoever mends it needs to see where it happened.
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"
