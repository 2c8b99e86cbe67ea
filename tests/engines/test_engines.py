"""Other engines load what was exported or trained for them, and give its text: vLLM and speculators."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import selfspec
from helpers import tiny
from helpers.engines import ROOT, ask_vllm, engine_python
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.embedded import DEMO, model_place
from selfspec.tools.export import export_checkpoint
from selfspec.tools.train.corpus import Blocks, Split
from selfspec.tools.train.eagle3 import Eagle3Lesson
from selfspec.tools.train.recipe import HeadRecipe

pytestmark = pytest.mark.engines
PROMPTS = (
    "import os\nimport sys\n\ndef main():\n    ",
    "class Reader:\n    def __init__(self, path):\n        self.path =",
)
TOKENS = 48


def test_an_exported_draft_keeps_its_text_and_is_accepted(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(model_place(DEMO), "float32", "cpu")
    drafter, length = selfspec.drafts.EarlyExit(4), 4
    export_checkpoint(checkpoint.model, checkpoint.tokenizer, drafter, tmp_path / "draft")
    ids = [checkpoint.encode(prompt) for prompt in PROMPTS]
    job: dict[str, Any] = {
        "model": model_place(DEMO),
        "speculative_config": None,
        "prompts": [prompt[0].tolist() for prompt in ids],
        "tokens": TOKENS,
    }
    plain = ask_vllm(job, tmp_path)
    draft_model = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": length}
    with_draft = ask_vllm({**job, "speculative_config": draft_model}, tmp_path)
    assert with_draft["texts"] == plain["texts"]

    spec = selfspec.wrap(checkpoint.model, drafter, draft_length=length)
    outs = [spec.generate(prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None) for prompt in ids]
    assert [out.sequences[0, prompt.shape[1] :].tolist() for out, prompt in zip(outs, ids, strict=True)] == plain[
        "texts"
    ]
    # vLLM takes a text's first token without a draft, so its rounds begin a token later.
    ours = sum(out.stats.accepted for out in outs) / sum(out.stats.rounds for out in outs)
    assert with_draft["accepted"] / with_draft["rounds"] == pytest.approx(ours, rel=0.1)


@pytest.mark.parametrize("vocabulary", [20, None])
def test_speculators_loads_all_of_a_trained_head_and_drafts_the_same(tmp_path: Path, vocabulary: int | None) -> None:
    python = engine_python("SELFSPEC_SPECULATORS_PYTHON")
    # The library reads the target's files.
    tiny.llama(num_hidden_layers=8, rms_norm_eps=1e-5).float().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    text = Blocks.of(tiny.prompt(24))
    lesson = Eagle3Lesson(model, HeadRecipe(depth=3, vocabulary=vocabulary), Split(text, text), 0)
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
