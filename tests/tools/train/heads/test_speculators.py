"""A trained EAGLE-3 head as the library computes it whose layout it has."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers import tiny
from helpers.engines import ROOT, engine_python
from selfspec.tools.train.corpus import Blocks, Split
from selfspec.tools.train.heads.eagle3 import Eagle3Lesson
from selfspec.tools.train.recipe import HeadRecipe

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("vocabulary", [20, None])
def test_speculators_loads_all_of_a_trained_head_and_drafts_the_same(tmp_path: Path, vocabulary: int | None) -> None:
    python = engine_python("SELFSPEC_SPECULATORS_PYTHON")
    # The library reads the target's files.
    tiny.llama(num_hidden_layers=8, rms_norm_eps=1e-5).float().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    text = Blocks.of(tiny.prompt(24))
    lesson = Eagle3Lesson(model, HeadRecipe(kind="eagle3", depth=3, vocabulary=vocabulary), Split(text, text), 0)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in lesson.model.parameters():
            weight.add_(torch.randn(weight.shape, generator=drawn) * 0.1)
        seen, _ = lesson._read(text)
        expected = lesson.model(seen, 3)
    folder = tmp_path / "head"
    folder.mkdir()
    lesson.save(folder, torch.float32, {})
    given = {
        "hidden_states": torch.cat(list(seen.features), -1),
        "input_ids": text.ids[:, 1:].contiguous(),
        "embedding": model.get_input_embeddings().weight.detach().contiguous(),
    }
    save_file(given, tmp_path / "given.safetensors")
    worker = ROOT / "tests" / "helpers" / "speculators_worker.py"
    command = [python, "-P", str(worker), str(folder), str(tmp_path / "given.safetensors"), str(tmp_path / "answer")]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    said = json.loads(found.stdout.splitlines()[-1])
    # What it lacks it takes from the target.
    taken = ["embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"]
    assert (said["differ"], said["lacking"]) == ([], taken)
    logits = load_file(tmp_path / "answer")
    for step, each in enumerate(expected):
        torch.testing.assert_close(logits[f"step_{step}"][0, : len(each)], each, rtol=1e-4, atol=1e-4)
