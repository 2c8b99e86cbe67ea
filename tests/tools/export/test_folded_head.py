"""An exit head becomes one more layer where it can, and is refused by name where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from assisted_rounds import assisted
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.draft.early_exit import ExitAdapter, ExitHead
from selfspec.model.early_head import DraftHead
from selfspec.model.fingerprint import fingerprint
from selfspec.tools.export.exported import export_checkpoint

HIDDEN = 32


def _head(model: PreTrainedModel, rank: int, scale: float = 1.0) -> ExitHead:
    adapter = ExitAdapter(HIDDEN, rank).double()
    with torch.no_grad():
        adapter.scale.fill_(scale)
        for weight in (adapter.norm.weight, adapter.gate.weight, adapter.up.weight, adapter.down.weight):
            weight.copy_(torch.randn_like(weight))
    return ExitHead(2, DraftHead(adapter.requires_grad_(False).eval()), fingerprint(model))


@pytest.mark.parametrize(("kind", "rank"), [("llama", 16), ("mistral", 48), ("qwen2", 16), ("qwen3", 48)])
def test_the_head_is_one_more_layer(kind: str, rank: int, tmp_path: Path) -> None:
    model = tiny.BUILDERS[kind](rms_norm_eps=1e-6, **({"sliding_window": tiny.CONTEXT} if kind == "mistral" else {}))
    drafter = _head(model, rank)
    report = export_checkpoint(model, None, drafter, tmp_path / "draft")
    assert (report.layers, report.folded) == ((0, 1), True)
    # Norms of these models compute in float32.
    assert report.off < 1e-5
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float64)
    assert draft.config.num_hidden_layers == 3
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": None}
    text = assisted(model, draft, tiny.prompt(5), 3, **options)
    chunks = list(selfspec.wrap(model, drafter, draft_length=3).stream(tiny.prompt(5), **options))
    assert text.ids[0, 5:].tolist() == [token for chunk in chunks for token in chunk.rows[0].tokens]
    assert [each.accepted for each in text.rounds][:-1] == [len(chunk.rows[0].tokens) - 1 for chunk in chunks][:-1]


@pytest.mark.parametrize(
    ("kind", "rank", "scale", "said"),
    [
        ("llama", 16, 1.1, "--foldable"),
        ("llama", 64, 1.0, "--rank 48"),
        ("gpt2", 16, 1.0, "no gated MLP"),
        ("bitnet", 16, 1.0, "choose another exit"),
    ],
)
def test_what_cannot_be_folded_is_refused(kind: str, rank: int, scale: float, said: str, tmp_path: Path) -> None:
    model = tiny.BUILDERS[kind]()
    with pytest.raises(selfspec.errors.SelfSpecError, match=said):
        export_checkpoint(model, None, _head(model, rank, scale), tmp_path / "draft")
    assert not any(tmp_path.iterdir())
