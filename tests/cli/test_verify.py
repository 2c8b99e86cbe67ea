"""`selfspec verify`: the verdict, where it is printed, and the exit status that says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.snippets import Invoke, Said, tight_budget
from selfspec.accept import TokenLevel
from selfspec.draft import Draft

QUICK = ["--max-new-tokens", "8", "--samples", "100", "--draft", "skip:attn=1"]


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("Once upon a time\n\n  \nTom had a big red ball.\n", encoding="utf-8")
    return file


def words(folder: str, file: Path, *more: str) -> list[str]:
    return ["verify", folder, *QUICK, "--prompt-file", str(file), *more]


def test_json_says_all(invoke: Invoke, folder: str, prompt_file: Path) -> None:
    ending = invoke(*words(folder, prompt_file, "--draft", "exit:4", "--output", "json"))
    found = json.loads(ending.stdout)
    assert (ending.status, ending.stderr) == (0, "")
    assert (found["verdict"], found["exact"], found["lossless"], found["failures"]) == ("EXACT", True, True, [])
    assert found["checkpoint"] == folder
    assert found["model"] == {"class": "LlamaForCausalLM", "dtype": "float32", "device": "cpu", "layers": 5}
    settings = found["settings"]
    assert settings["prompts"] == ["Once upon a time", "Tom had a big red ball."]
    assert settings["accept"] == ["token", "block", "coupled"]
    assert settings["threads"] == torch.get_num_threads()
    assert (settings["max_new_tokens"], settings["samples"], settings["seed"]) == (8, 100, 0)
    assert [draft["draft"] for draft in found["drafts"]] == ["none", "skip:attn=1", "exit:4"]
    assert found["smallest_p_value"] == min(fit["p_value"] for draft in found["drafts"] for fit in draft["fits"])
    assert found["versions"].keys() == {"selfspec", "torch", "transformers", "python"}


def test_text_ends_with_the_verdict(invoke: Invoke, folder: str, prompt_file: Path) -> None:
    ending = invoke(*words(folder, prompt_file))
    assert (ending.status, ending.stderr) == (0, "")
    for said in ("What is equal, by draft", "skip:attn=1", "2/2", "16/16", "Rounding:", "logits"):
        assert said in ending.stdout
    assert "--output json lists" not in ending.stdout
    last = ending.stdout.rstrip().splitlines()[-3:]
    assert any(line.startswith("EXACT: all 32 greedy tokens are the model's own") for line in last)


def test_a_planted_error_fails_it(
    invoke: Invoke, folder: str, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It draws the bonus token from the place before it."""

    def behind(self: TokenLevel, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        return p[torch.arange(p.shape[0]), (place - 1).clamp(min=0)]

    monkeypatch.setattr(TokenLevel, "recovery_probs", behind)
    ending = invoke(*words(folder, prompt_file))
    assert (ending.status, ending.stderr) == (1, "")
    for said in ("--output json lists", "- skip:attn=1: free-running token", "NOT EXACT: skip:attn=1:"):
        assert said in ending.stdout
    ending = invoke(*words(folder, prompt_file, "--output", "json"))
    found = json.loads(ending.stdout)
    assert (ending.status, ending.stderr) == (1, "")
    assert (found["verdict"], found["exact"]) == ("NOT EXACT", False)
    assert found["failures"]
    divergence = found["divergences"][0]
    assert (divergence["check"], divergence["near_tie"]) == ("free-running", False)
    assert divergence["gap"] > found["bound"]["near_tie"]


def test_an_interrupt(invoke: Invoke, folder: str, prompt_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("selfspec.tools.verify.verification.read_reference", interrupted)
    ending = invoke(*words(folder, prompt_file, "--output", "json"))
    assert ending.status == 130
    assert json.loads(ending.stdout)["error"] == {"type": "KeyboardInterrupt", "message": "interrupted"}
    assert ending.stderr.strip() == "interrupted"


@pytest.mark.tools
@pytest.mark.parametrize("draft", [(), ("--draft", "int4", "--draft", "lookup")])
def test_models_are_verified_within_a_budget(
    said: Said, folder: str, prompt_file: Path, monkeypatch: pytest.MonkeyPatch, draft: tuple[str, ...]
) -> None:
    tight_budget(monkeypatch)
    asked = ["--memory", "1TiB", "--max-new-tokens", "4", "--samples", "100", "--prompt-file", str(prompt_file)]
    found = said("verify", folder, *asked, *draft)
    assert (found["exact"], found["settings"]["memory"]) == (True, "1TiB")
    named = [each["draft"] for each in found["drafts"]]
    assert named[:3] == ["none", "int4", "lookup"] if draft else named[1] in ("lookup+int8", "lookup+int4")
