"""Files of described tensors with other contents, and checksums that fit them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from selfspec.files.json_text import write_described

Change = Callable[[dict[str, Any], dict[str, Any]], object]


def rewrite(file: str | Path, change: Change) -> None:
    """Let `change` alter a file's tensors, and what it says of itself, in place."""
    with safe_open(file, framework="pt") as opened:
        ((key, said),) = opened.metadata().items()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    about = json.loads(said)
    change(tensors, about)
    write_described(Path(file), key, about, tensors)
