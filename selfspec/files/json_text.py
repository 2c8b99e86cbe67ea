"""Reading JSON that anyone may have written: whatever is wrong with it is a `ValueError`."""

from __future__ import annotations

import json
import re
from typing import Any

# Longer integers fit no float.
_MOST_DIGITS = 300
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str) -> Any:
    """The value that a JSON text holds. All its integers fit a float, and all its strings can be written as UTF-8.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or holds a number with too many digits or half a character.
    """
    try:
        value = json.loads(text, parse_int=_integer)
        if _SURROGATE.search(text):
            # Half of a surrogate pair is no text: no tokenizer takes it, and no file.
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)
