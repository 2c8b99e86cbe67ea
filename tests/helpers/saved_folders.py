"""What tests of saved folders share: selfspec as if installed, a count of rounds, and a small trained model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import dynamic_module_utils

import selfspec
from selfspec.draft import Budget, Draft, RowsView
from selfspec.draft.along_layer_path import LayerPathProposer
from selfspec.files.json_text import write_described


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """selfspec as an installed distribution, and a place of this test's own for code that is loaded."""
    metadata = tmp_path / "site" / f"selfspec-{selfspec.__version__}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: selfspec\nVersion: {selfspec.__version__}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    drafted: list[int] = []
    right = LayerPathProposer.propose

    def counted(self: LayerPathProposer, batch: RowsView, budget: Budget) -> Draft:
        drafted.append(budget.depth)
        return right(self, batch, budget)

    monkeypatch.setattr(LayerPathProposer, "propose", counted)
    return drafted


Change = Callable[[dict[str, Any], dict[str, Any]], object]


def rewrite(file: str | Path, change: Change) -> None:
    """Let `change` alter a file's tensors, and what it says of itself, in place."""
    with safe_open(file, framework="pt") as opened:
        ((key, said),) = opened.metadata().items()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    about = json.loads(said)
    change(tensors, about)
    write_described(Path(file), key, about, tensors)


PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "One day, a dog and a cat went to the park.",
    "Tom had a big red ball. He liked to",
)
"""Beginnings of stories such as the model was trained on."""


def checkpoint_folder() -> Path:
    """The `transformers` folder of the model."""
    return Path(__file__).parents[1] / "models" / "stories260K"
