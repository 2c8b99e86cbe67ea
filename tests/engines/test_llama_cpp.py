"""llama.cpp loads what was exported for it, and its greedy text is that of the same layers in `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.engines import ask_llama_cpp
from helpers.stories import checkpoint_folder
from selfspec.draft import Drafter
from selfspec.draft.early_exit import ExitAdapter, ExitHead
from selfspec.measure.embedded import DEMO, model_place
from selfspec.model.checkpoint import load_checkpoint
from selfspec.model.early_head import DraftHead
from selfspec.model.identity import fingerprint
from selfspec.tools.export.exported import export_checkpoint, export_gguf

pytestmark = pytest.mark.engines
VOCABULARY = 257
TEXTS = ("Once upon a time there were 3 dogs.\n  And", "def main(argument):\n    return 1234", "kůň 你好")


# llama.cpp loads none that merges nothing.
TOKENIZER = tiny.tokenizer(("a", "b"))


def _texts(folder: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = [torch.tensor([prompt]) for prompt in prompts]
    found = [model.generate(each, attention_mask=torch.ones_like(each), **options) for each in ids]
    return [out[0, len(prompt) :].tolist() for out, prompt in zip(found, prompts, strict=True)]


@pytest.mark.parametrize("place", [str(checkpoint_folder()), model_place(DEMO)], ids=["pieces", "bytes"])
def test_text_and_tokens_of_a_trained_model_are_equal(place: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(place, "float32", "cpu")
    model, tokenizer, drafter = checkpoint.model, checkpoint.tokenizer, selfspec.drafts.EarlyExit(3)
    export_checkpoint(model, tokenizer, drafter, tmp_path / "draft")
    export_gguf(model, tokenizer, drafter, tmp_path / "draft.gguf")
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    jobs = [{"ids": ids, "tokens": 40, "temperature": 0, "seed": 0} for ids in prompts]
    answers = ask_llama_cpp(tmp_path / "draft.gguf", [*jobs, *({"encode": text} for text in TEXTS)])
    assert [answer["text"] for answer in answers[:3]] == _texts(tmp_path / "draft", prompts, 40)
    assert [answer["ids"] for answer in answers[3:]] == prompts


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "rope_parameters": tiny.LLAMA3_ROPE}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_every_architecture_gives_equal_text(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.BUILDERS[kind](vocab_size=VOCABULARY, dtype=torch.float32, **options)
    for number, drafter in enumerate((selfspec.drafts.EarlyExit(2), selfspec.drafts.LayerSkip(layers=[1, 2]))):
        _check_equal(model, drafter, tmp_path / str(number))


def test_a_folded_head_gives_equal_text(tmp_path: Path) -> None:
    model = tiny.llama(vocab_size=VOCABULARY, dtype=torch.float32, rms_norm_eps=1e-6)
    adapter = ExitAdapter(32, 24)
    torch.nn.init.normal_(adapter.down.weight)
    drafter = ExitHead(2, DraftHead(adapter.requires_grad_(False)), fingerprint(model))
    _check_equal(model, drafter, tmp_path)


def _check_equal(model: PreTrainedModel, drafter: Drafter, folder: Path) -> None:
    export_checkpoint(model, TOKENIZER, drafter, folder / "draft")
    export_gguf(model, TOKENIZER, drafter, folder / "draft.gguf")
    prompts = [tiny.prompt(7, seed=seed, vocabulary=VOCABULARY)[0].tolist() for seed in range(3)]
    jobs = [{"ids": ids, "tokens": 24, "temperature": 0, "seed": 0} for ids in prompts]
    answers = ask_llama_cpp(folder / "draft.gguf", jobs)
    assert [answer["text"] for answer in answers] == _texts(folder / "draft", prompts, 24)
