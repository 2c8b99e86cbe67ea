"""`selfspec demo`: three ways to decode agree, and where they do not, it fails."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.running import Invoke
from selfspec.measure.embedded import PROMPTS
from selfspec.measure.peak_memory import peak_memory
from selfspec.tools.bench import measure
from selfspec.tools.bench.agreement import TextAgreement

QUICK = ["demo", "--max-new-tokens", "8", "--repeats", "1"]


def test_json(invoke: Invoke) -> None:
    ending = invoke(*QUICK, "--draft", "exit:3", "--draft-length", "2", "--output", "json")
    found = json.loads(ending.stdout)
    assert ending.status == 0
    assert found["identical"]
    assert [text["prompt"] for text in found["texts"]] == list(PROMPTS)
    assert all(text["text"].startswith(text["prompt"]) for text in found["texts"])
    assert [cell["cell"]["temperature"] for cell in found["cells"]] == [0.0, 0.8]
    names = ["model.generate", "selfspec plain", "selfspec exit:3, length 2"]
    for cell in found["cells"]:
        assert [arm["name"] for arm in cell["arms"]] == names
        assert all(arm["decoding_tokens_per_second"]["value"] > 0 for arm in cell["arms"])
    assert (found["settings"]["draft"], found["settings"]["repeats"]) == ("exit:3", 1)


@pytest.mark.parametrize("same", [True, False])
def test_text(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    monkeypatch.setattr(measure, "compare", lambda *_: TextAgreement(4, 4 if same else 3))
    ending = invoke(*QUICK)
    assert ending.status == (0 if same else 1)
    for said in ("def get_db():", "decoding, against", "model.generate", "selfspec plain", "selfspec lookup+exit:4"):
        assert said in ending.stdout
    assert ("All tokens are identical." in ending.stdout) == same
    assert ending.stderr.startswith("" if same else "error: greedy tokens of model.generate, selfspec plain")
    assert ending.stderr.count("\n") == (0 if same else 1)


def test_tokens_that_differ_fail_it(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "compare", lambda *_: TextAgreement(4, 3))
    ending = invoke(*QUICK, "--output", "json")
    found = json.loads(ending.stdout)
    assert ending.status == 1
    assert not found["identical"]
    assert found["error"]["type"] == "TokensDifferError"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--draft", "none"], "give --draft exit:E"),
        (["--draft", "exit:12"], "choose 1..11"),
        (["--repeats", "0"], "--repeats"),
        (["--temperature", "0"], "give one above 0"),
        (["--max-new-tokens", "1"], "--max-new-tokens"),
        (["--max-new-tokens", "2100"], "context of 2048"),
    ],
)
def test_bad_input(invoke: Invoke, words: list[str], remedy: str) -> None:
    ending = invoke("demo", *words)
    assert (ending.status, ending.stdout) == (2, "")
    assert remedy in ending.stderr


def test_peak_memory_sees_what_was_freed_again() -> None:
    peak = peak_memory(lambda: torch.ones(2**24).sum(), torch.device("cpu"))
    if peak is None:
        pytest.skip("this system does not tell")
    assert 0.8 * 2**26 < peak < 4 * 2**26
