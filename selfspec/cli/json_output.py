"""JSON on standard output, one object and nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object on one line."""
    # Written as ASCII, so that no terminal or pipe encoding can spoil it.
    sys.stdout.write(json.dumps(content, allow_nan=False) + "\n")
    sys.stdout.flush()
