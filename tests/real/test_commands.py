"""Chats, verdicts and budgets of real checkpoints, and texts with every kind of draft: the model's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.engines import Real
from helpers.snippets import Said
from real.checkpoints import read_prompts

pytestmark = pytest.mark.real

NEW = 16
ON_CPU = ("--device", "cpu", "--threads", "1")


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_verify(said: Said, real: Callable[[str], Real], tmp_path: Path, model: str) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The capital of France is\nOne, two, three,\n")
    words = ("verify", real(model).folder, "--dtype", "float32", "--prompt-file", str(prompts), "--samples", "100")
    few = ("--draft", "int8", "--max-new-tokens", "8", "--accept", "token", "--accept", "coupled", *ON_CPU)
    assert said(*words, *few)["verdict"] == "EXACT"


def test_chat(said: Said, real: Callable[[str], Real]) -> None:
    smollm2, question = real("smollm2"), "What is the capital of Italy?"
    words = ("chat", smollm2.folder, "--dtype", "float32", "--draft", "lookup+int8", "--max-new-tokens", str(NEW))
    found = said(*words, *ON_CPU, stdin=f"{question}\nAnd of Spain?\n".encode())
    answers = [each["content"] for each in found["messages"] if each["role"] == "assistant"]
    own = smollm2.tokenizer.decode(smollm2.stock(smollm2.ids(question), NEW), skip_special_tokens=True)
    assert answers[0].strip() == own.strip()
    assert found["turns"][1]["kept_tokens"] > 0


@pytest.mark.parametrize(("model", "memory"), [("smollm2", "800MiB"), ("gemma3", "1600MiB")])
def test_streamed(real: Callable[[str], Real], model: str, memory: str) -> None:
    """In a process of its own, whose size counts."""
    prompt, checkpoint = "The capital of France is", real(model)
    words = ["generate", checkpoint.folder, "--prompt", prompt, "--max-new-tokens", "12", "--dtype", "float32"]
    words += ["--memory", memory, "--context", "256", *ON_CPU, "--output", "json"]
    ended = subprocess.run([sys.executable, "-m", "selfspec", *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["settings"]["draft"] != "none"
    assert found["token_ids"] == checkpoint.stock(torch.tensor([found["prompt_token_ids"]]), 12)


# Tokens of a text; the larger vocabulary is the slower one.
NEW_DRAFTS = {"smollm2": 24, "gemma3": 12}
# On every prompt.
ALWAYS = ("int8", "lookup+recycle")
# In turns, each on several prompts.
IN_TURNS = (
    "exit:{half}",
    "exit:{last}",
    "skip:attn={half}",
    "skip:mlp={half}",
    "skip:layers={half}",
    "int4",
    "int8+exit:{last}",
    "lookup",
    "suffix",
    "recycle",
    "lookup+int8",
    "suffix+recycle+int8",
    "tree recycle",
    "tree int8",
)
DEPTHS = {"smollm2": 30, "gemma3": 18}


def cases() -> list[Any]:
    found: list[Any] = []
    for model, depth in DEPTHS.items():
        turns = cycle(IN_TURNS)
        for number, line in enumerate(read_prompts()):
            draft = next(turns).format(half=depth // 2, last=depth - 1)
            found.append(pytest.param(model, line["prompt"], draft, id=f"{model}-{line['kind']}-{number}"))
    return found


@pytest.mark.parametrize(("model", "prompt", "draft"), cases())
def test_a_text_is_that_of_generate(real: Callable[[str], Real], model: str, prompt: str, draft: str) -> None:
    checkpoint = real(model)
    ids = checkpoint.ids(prompt)
    expected = checkpoint.stock(ids, NEW_DRAFTS[model])
    for name in (*ALWAYS, draft):
        spec = checkpoint.drafting(name)
        out = spec.generate(ids, torch.ones_like(ids), max_new_tokens=NEW_DRAFTS[model], do_sample=False)
        assert out.sequences[0, ids.shape[1] :].tolist() == expected, name
