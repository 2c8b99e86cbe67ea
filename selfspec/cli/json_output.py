"""JSON on standard output, one object and nothing else; and what every such object says of the versions used."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from typing import Any


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object on one line."""
    # Written as ASCII, so that no terminal or pipe encoding can spoil it.
    sys.stdout.write(json.dumps(content, allow_nan=False) + "\n")
    sys.stdout.flush()


def versions() -> dict[str, str]:
    """Versions of what ran."""
    import torch
    import transformers

    import selfspec

    return {
        "selfspec": selfspec.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
