"""Where the prompt comes from: `--prompt`, `--prompt-file` or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from selfspec.errors import PromptError


def read_prompt(text: str | None, file: Path | None) -> str:
    """The prompt from its one source; standard input is read only where neither option is given.

    Files and pipes usually end with a line break that is not meant: one is taken off.

    Raises:
        PromptError: there is none, there are two, it is empty, or it is not UTF-8.
    """
    if text is not None and file is not None:
        raise PromptError("give the prompt once: --prompt or --prompt-file")
    if text is not None:
        return _checked(text)
    if file is not None:
        try:
            return _decoded(file.read_bytes(), str(file))
        except OSError as error:
            raise PromptError(f"--prompt-file {file} cannot be read: {error.strerror or error}") from error
    if sys.stdin is None or sys.stdin.isatty():
        raise PromptError("no prompt: give --prompt TEXT or --prompt-file FILE, or pipe it in")
    return _decoded(sys.stdin.buffer.read(), "standard input")


def _decoded(content: bytes, source: str) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{source} is not UTF-8 text ({error}); convert it first") from error
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise PromptError(f"{source} is empty; give some text, or --prompt '' to start from the bos token alone")
    return text


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # The shell gave bytes that are no text.
        raise PromptError(f"--prompt is not UTF-8 text ({error}); convert it first") from error
    return text
