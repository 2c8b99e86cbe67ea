"""What `--prompt-file` means to `verify`: one prompt a line."""

from __future__ import annotations

from pathlib import Path

from selfspec.errors import PromptError


def read_prompts(file: Path, option: str = "--prompt-file") -> tuple[str, ...]:
    """The prompts of a file, one a line; empty lines do not count.

    Args:
        file: UTF-8 text.
        option: that named it, for messages.

    Raises:
        PromptError: it cannot be read, is not UTF-8, or holds no prompt.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"{option} {file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{file} is not UTF-8 text ({error}); convert it first") from error
    prompts = tuple(line for line in text.splitlines() if line.strip())
    if not prompts:
        raise PromptError(f"{file} holds no prompt; write one a line")
    return prompts
