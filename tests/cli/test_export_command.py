"""`selfspec export`: a folder or file that other engines load."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoModelForCausalLM

from helpers.running import Invoke


def test_it_writes_a_checkpoint(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    to = tmp_path / "draft"
    ending = invoke("export", folder, "--draft", "exit:2", "--to", str(to))
    assert (ending.status, ending.stderr) == (0, "")
    assert f"{to}: exit:2, 2 layers" in ending.stdout
    assert "assistant_model" in ending.stdout
    assert AutoModelForCausalLM.from_pretrained(to).config.num_hidden_layers == 2
    again = invoke("export", folder, "--draft", "skip:layers=1", "--to", str(to))
    assert again.status == 1
    assert "--overwrite" in again.stderr
    over = invoke("export", folder, "--draft", "skip:layers=1", "--to", str(to), "--overwrite", "--output", "json")
    assert json.loads(over.stdout)["layers"] == [0, 2, 3, 4]


def test_it_writes_gguf(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    to = tmp_path / "draft.gguf"
    words = ("export", folder, "--format", "gguf", "--to", str(to), "--precision", "q8_0", "--draft")
    found = json.loads(invoke(*words, "exit:2", "--output", "json").stdout)
    assert to.stat().st_size == found["size"]
    assert to.read_bytes()[:4] == b"GGUF"
    assert json.loads(invoke(*words, "none", "--overwrite", "--output", "json").stdout)["share"] == 1
