"""vLLM drafts with what was exported, and by look-ups: its greedy text stays its own, and drafts are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import selfspec
from helpers.engines import ask_vllm
from selfspec.measure.embedded import DEMO, model_place
from selfspec.model.checkpoint import load_checkpoint
from selfspec.tools.export.exported import export_checkpoint

pytestmark = pytest.mark.engines
PROMPTS = (
    "import os\nimport sys\n\ndef main():\n    ",
    "class Reader:\n    def __init__(self, path):\n        self.path =",
)
TOKENS = 48


def test_exported_drafts_and_look_ups_keep_its_text_and_are_accepted(tmp_path: Path) -> None:
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
    look_ups = {
        "method": "custom_class",
        "model": "selfspec.tools.export.vllm.LookUps",
        "num_speculative_tokens": length,
    }
    with_look_ups = ask_vllm({**job, "speculative_config": look_ups}, tmp_path)
    assert with_draft["texts"] == with_look_ups["texts"] == plain["texts"]

    spec = selfspec.wrap(checkpoint.model, drafter, draft_length=length)
    outs = [spec.generate(prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None) for prompt in ids]
    assert [out.sequences[0, prompt.shape[1] :].tolist() for out, prompt in zip(outs, ids, strict=True)] == plain[
        "texts"
    ]
    # vLLM takes a text's first token without a draft, so its rounds begin a token later.
    ours = sum(out.stats.accepted for out in outs) / sum(out.stats.rounds for out in outs)
    assert with_draft["accepted"] / with_draft["rounds"] == pytest.approx(ours, rel=0.1)
    assert with_look_ups["accepted"] > with_look_ups["rounds"]
