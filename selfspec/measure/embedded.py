"""The checkpoint of the demonstration, and prompts for it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from selfspec.errors import CheckpointError

DEMO = "demo"
"""Name of the embedded model in commands and studies."""

PROMPTS = tuple(json.loads(line)["text"] for line in Path(__file__).with_name("demo.jsonl").read_bytes().splitlines())
"""Beginnings of Python files that the model was not trained on: the first held-out ones of four projects."""


def checkpoint_folder() -> Path:
    """Return the `transformers` folder of the embedded model, with its MODEL_CARD.md.

    Raises:
        CheckpointError: it is not installed.
    """
    found = find_spec("selfspec_demo_model")
    if found is None or not found.submodule_search_locations:
        raise CheckpointError(
            "the demo's model is a package of its own, and is not installed: pip install selfspec-demo-model, or "
            "./demo_model in a clone of selfspec"
        )
    return Path(found.submodule_search_locations[0]) / "model"


def model_place(model: str) -> str:
    """Return the folder or hub name of a model that commands and studies name."""
    return str(checkpoint_folder()) if model == DEMO else model
