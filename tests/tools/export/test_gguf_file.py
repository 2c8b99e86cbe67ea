"""GGUF files hold the draft's weights and its tokenizer. What llama.cpp makes of them is tested in tests/engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import selfspec
from helpers import tiny
from selfspec.tools.export.exported import export_gguf

# llama.cpp loads none that merges nothing.
TOKENIZER = tiny.tokenizer(("a", "b"))


def _read(file: Path) -> Any:
    return gguf.GGUFReader(file)


def test_layers_norms_and_head_are_there(tmp_path: Path) -> None:
    model = tiny.llama(vocab_size=260, dtype=torch.float32)
    report = export_gguf(model, TOKENIZER, selfspec.drafts.EarlyExit(2), tmp_path / "draft.gguf")
    read = _read(tmp_path / "draft.gguf")
    found = {tensor.name: tensor.data for tensor in read.tensors}
    assert sum(name.startswith("blk.1.") for name in found) == 9
    assert not any(name.startswith("blk.2.") for name in found)
    assert np.array_equal(found["output.weight"], model.lm_head.weight.detach().numpy())
    assert np.array_equal(found["blk.1.ffn_up.weight"], model.model.layers[1].mlp.up_proj.weight.detach().numpy())
    assert read.fields["llama.block_count"].contents() == 2
    assert read.fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert len(read.fields["tokenizer.ggml.tokens"].contents()) == 260
    assert report.size == (tmp_path / "draft.gguf").stat().st_size


def test_a_tied_head_is_written_once_and_the_whole_model_too(tmp_path: Path) -> None:
    model = tiny.qwen2(vocab_size=260, tie_word_embeddings=True, dtype=torch.float32)
    report = export_gguf(model, TOKENIZER, None, tmp_path / "whole.gguf", precision="q8_0")
    read = _read(tmp_path / "whole.gguf")
    names = [tensor.name for tensor in read.tensors]
    assert "output.weight" not in names
    assert "blk.3.attn_q.bias" in names
    assert report.share == 1
    # Positions that a window would hide are left out.
    assert read.fields["qwen2.context_length"].contents() == tiny.WINDOW


def test_scaled_rotary_positions_are_a_table(tmp_path: Path) -> None:
    model = tiny.llama(vocab_size=260, rope_parameters=tiny.LLAMA3_ROPE)
    export_gguf(model, TOKENIZER, selfspec.drafts.EarlyExit(1), tmp_path / "draft.gguf")
    found = {tensor.name: tensor.data for tensor in _read(tmp_path / "draft.gguf").tensors}
    assert found["rope_freqs.weight"].tolist() == pytest.approx([1.0, 8.0, 8.0, 8.0], abs=1e-5)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("model", "tokenizer", "said"),
    [
        (lambda: tiny.gpt2(vocab_size=260), TOKENIZER, "only llama, mistral, qwen2, qwen3"),
        (lambda: tiny.qwen3(vocab_size=260, rope_parameters=YARN), TOKENIZER, "type 'yarn'"),
        (lambda: tiny.llama(vocab_size=260), tiny.tokenizer(), "only those that merge pairs"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, model: Any, tokenizer: Any, said: str) -> None:
    with pytest.raises(selfspec.errors.UnsupportedModelError, match=said):
        export_gguf(model(), tokenizer, selfspec.drafts.EarlyExit(2), tmp_path / "draft.gguf")
    assert not any(tmp_path.iterdir())
    (tmp_path / "draft.gguf").write_text("mine")
    with pytest.raises(selfspec.errors.StorageError, match="there already"):
        export_gguf(tiny.llama(vocab_size=260), TOKENIZER, selfspec.drafts.EarlyExit(2), tmp_path / "draft.gguf")
    assert (tmp_path / "draft.gguf").read_text() == "mine"
