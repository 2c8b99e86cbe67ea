"""What `--prompts` means to `calibrate`: one prompt a line, or JSON lines with `prompt` or `text`."""

from __future__ import annotations

from pathlib import Path

from selfspec.cli.verify_prompts import read_prompts as read_lines
from selfspec.errors import PromptError
from selfspec.files.json_text import parse_json

# The beginning of a text stands for a prompt.
_CHARACTERS = 400


def read_prompts(file: Path, most: int) -> tuple[str, ...]:
    """The first prompts of a file; of a longer `text` its beginning.

    Args:
        file: lines of text; of JSON if its name ends in `.jsonl`.
        most: how many to take.

    Raises:
        PromptError: it cannot be read, is not UTF-8, or holds no prompt.
    """
    lines = read_lines(file, "--prompts")[:most]
    if file.suffix != ".jsonl":
        return lines
    return tuple(_prompt(line, f"{file}, line {number}") for number, line in enumerate(lines, 1))


def _prompt(line: str, place: str) -> str:
    try:
        content = parse_json(line)
    except ValueError as error:
        raise PromptError(f"{place} is no JSON ({error})") from error
    found = {name: content.get(name) for name in ("prompt", "text")} if isinstance(content, dict) else {}
    for name, text in found.items():
        if isinstance(text, str) and text:
            return text if name == "prompt" else text[:_CHARACTERS]
    raise PromptError(f"{place} has no text under 'prompt' or 'text'")
