"""GGUF files by path: text is that of the model with dense weights, in the bytes of the file, streamed too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.copies import plan, wrapped
from helpers.gguf_files import write_gguf
from selfspec.errors import CheckpointError, UnsupportedModelError, UnsupportedOptionError
from selfspec.formats.gguf import Gguf
from selfspec.formats.packed import PackedWeight
from selfspec.kernels.native import BLOCKS
from selfspec.model.checkpoint import load_tokenizer, read_config
from selfspec.model.view import is_streamed
from selfspec.placement.place import place
from selfspec.placement.survey import survey
from selfspec.placement.weight_source import FromDisk

SIZES = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "dtype": torch.float32}
TOKENIZER = tiny.tokenizer(("a", "b"))
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": None}


def written(folder: Path, model: PreTrainedModel, precision: str = "q8_0") -> Path:
    file = folder / "model.gguf"
    write_gguf(model, TOKENIZER, file, precision)
    return file


def stock(file: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model with dense weights, by `transformers`."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    return model.eval()


@pytest.mark.parametrize("precision", ["q8_0", "f16", "bf16", "f32"])
@pytest.mark.parametrize(
    "build", [tiny.llama, lambda **sizes: tiny.qwen2(tie_word_embeddings=True, sliding_window=None, **sizes)]
)
def test_text_is_that_of_dense_weights(build: Any, precision: str, tmp_path: Path) -> None:
    file = written(tmp_path, build(**SIZES), precision)
    dense, ids = stock(file), tiny.prompt(12)
    found = selfspec.load(file, draft=False)
    assert torch.equal(found.generate(ids, **OPTIONS).sequences, dense.generate(ids, **OPTIONS))
    torch.testing.assert_close(found.model(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-4)
    expected = found.generate(ids, **OPTIONS).sequences
    for draft in ("lookup", "exit:2", "int4"):
        assert torch.equal(found.drafting(draft).generate(ids, **OPTIONS).sequences, expected)
    exact = selfspec.load(file, dtype="float64", draft="exit:3").generate(ids, **OPTIONS)
    assert torch.equal(exact.sequences, stock(file, torch.float64).generate(ids, **OPTIONS))


def test_weights_take_the_bytes_of_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, tiny.llama(**SIZES))
    model = selfspec.load(file, draft=False).model
    held = {id(each): each.nbytes for each in model.parameters()}
    assert sum(held.values()) <= 1.02 * file.stat().st_size
    matrices = [each for each in model.parameters() if each.ndim == 2]
    assert all(isinstance(each, PackedWeight) for each in matrices)


@pytest.mark.parametrize("split", [(1, None, 0), (0, "int4", 0), (5, None, 0)], ids=str)
def test_weights_are_streamed(split: tuple[int, str | None, int], tmp_path: Path) -> None:
    file, ids = written(tmp_path, tiny.llama(**SIZES)), tiny.prompt(12)
    expected = selfspec.load(file, draft=False).generate(ids, **OPTIONS).sequences
    spec = wrapped(place(survey(str(file), None, 128, FromDisk(), Gguf()), plan(*split)))
    assert torch.equal(spec.generate(ids, **OPTIONS).sequences, expected)
    assert any(map(is_streamed, spec.model.modules())) == (split[0] < 5)


def test_what_a_file_says_of_text(tmp_path: Path) -> None:
    file = written(tmp_path, tiny.llama(**SIZES))
    config, tokenizer = read_config(str(file)), load_tokenizer(str(file))
    assert config.vocab_size == 260
    assert config.num_key_value_heads == 2
    assert tokenizer("ab ba").input_ids == TOKENIZER("ab ba").input_ids
    assert config.eos_token_id == TOKENIZER.eos_token_id


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, tiny.llama(**SIZES))
    with pytest.raises(UnsupportedOptionError, match="stay in its own bytes"):
        selfspec.load(file, weights="planes")
    with pytest.raises(UnsupportedOptionError, match="float32 or float64"):
        selfspec.load(file, dtype="bfloat16")
    whole = file.read_bytes()
    for size, said in ((len(whole) - 64, "truncated"), (100, "no whole GGUF file")):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=said):
            selfspec.load(file)
    file.write_bytes(whole)
    scaled = written(tmp_path, tiny.llama(**SIZES, rope_parameters=tiny.LLAMA3_ROPE))
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        selfspec.load(scaled)


def test_a_type_without_kernels_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, tiny.llama(**SIZES))
    name = b"blk.0.attn_v.weight"
    header = bytearray(file.read_bytes())
    place = header.index(name) + len(name) + 4 + 16
    assert header[place : place + 4] == np.uint32(gguf.GGMLQuantizationType.Q8_0).tobytes()
    header[place : place + 4] = np.uint32(gguf.GGMLQuantizationType.IQ2_XS).tobytes()
    file.write_bytes(header)
    with pytest.raises(CheckpointError, match="IQ2_XS") as refused:
        selfspec.load(file)
    assert all(kind in str(refused.value) for kind in BLOCKS)
