"""How a command ends: its result as JSON on stdout, a line on stderr for an error, and the exit status."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import Field, asdict, dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import typer

from selfspec.errors import NonFiniteLogitsError, SelfSpecError, StorageError
from selfspec.measure.embedded import DEMO

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


class Result(Protocol):
    """What a command returns: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class FailedCheckError(Exception):
    """What a command checks did not hold. Its message is all that needs to be said."""


class FailedRunError(Exception):
    """A run that failed or was interrupted after it had a result."""

    def __init__(self, cause: BaseException, result: Result) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.result = result


NO_MODEL = f"name a model: a checkpoint folder, a hub name, or {DEMO}"
"""What every command says that needs a model and was given none."""

SCHEMA_VERSION = 1
"""The version of what `--output json` prints: docs/json_output.md describes it."""


@dataclass(frozen=True)
class Failure:
    """What ended a command.

    Attributes:
        type: name of the error's class: see the reference.
        message: one line that names the remedy.
    """

    type: str
    message: str


def print_json(result: Result | None, failure: Failure | None = None) -> None:
    """Print a result as one JSON object on one line, which says the version of its schema, and of what made it.

    A field whose default is None is left out where it is None.
    """
    content: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
    if result is not None:
        from selfspec.measure.environment import versions

        absent = {each.name for each in fields(result) if each.default is None and getattr(result, each.name) is None}
        content |= {name: value for name, value in asdict(result).items() if name not in absent}
        content["versions"] = versions()
    if failure is not None:
        content["error"] = asdict(failure)
    # ASCII survives every encoding of a terminal or pipe.
    sys.stdout.write(json.dumps(content, allow_nan=False) + "\n")
    sys.stdout.flush()


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for JSON; read from its words, since it may not parse."""
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
    """Print one line on stderr and, for JSON, an object with `error` on stdout."""
    cause = error.cause if isinstance(error, FailedRunError) else error
    result = error.result if isinstance(error, FailedRunError) else None
    message = _message(cause)
    if as_json:
        print_json(result, Failure(type(cause).__name__, message))
    # Without any words typer shows the help, and there is no message.
    if message:
        print(message if isinstance(cause, KeyboardInterrupt) else f"error: {message}", file=sys.stderr)


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, typer.TyperException):
        message = error.format_message()
        return NO_MODEL if message == "Missing argument 'MODEL'." else message
    if isinstance(error, SelfSpecError | FailedCheckError):
        return str(error)
    if type(error).__name__ == "OutOfMemoryError":
        return f"out of memory ({str(error).splitlines()[0]}); try --dtype bfloat16, fewer new tokens or --device cpu"
    # Any other error is a bug of selfspec, and its place helps to fix it.
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"
