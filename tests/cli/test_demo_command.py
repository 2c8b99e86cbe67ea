"""`selfspec demo`: it shows texts and scores of all ways to decode, and fails where tokens differ."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.running import Invoke
from selfspec.cli.demo import Standing, headline
from selfspec.measure.embedded import PROMPTS
from selfspec.measure.estimate import Estimate
from selfspec.measure.timing import peak_memory
from selfspec.tools.lab import turns
from selfspec.tools.lab.turns import Score, TextAgreement

QUICK = ["demo", "--max-new-tokens", "8", "--seconds", "0", "--threads", "1"]


@pytest.mark.tools
def test_json(invoke: Invoke) -> None:
    ending = invoke(*QUICK, "--draft", "exit:3", "--output", "json")
    found = json.loads(ending.stdout)
    assert (ending.status, ending.stderr) == (0, "")
    assert found["identical"]
    assert [text["prompt"] for text in found["texts"]] == list(PROMPTS[:1])
    assert all(text["text"].startswith(text["prompt"]) for text in found["texts"])
    names = ["model.generate", "plain", "lookup", "recycle", "exit:4", "int8", "exit:3"]
    assert [arm["name"] for arm in found["arms"]] == names
    for arm in found["arms"]:
        assert all(arm[kind]["tokens_per_second"] > 0 for kind in ("greedy", "sampled"))
    assert found["arms"][0]["greedy"]["speedup"]["value"] == 1
    assert "model.generate" in found["headline"]
    assert (found["settings"]["draft"], found["settings"]["max_new_tokens"], found["turns"]) == ("exit:3", 8, 1)


def test_text_of_a_single_turn_has_no_interval(invoke: Invoke) -> None:
    ending = invoke(*QUICK)
    assert (ending.status, ending.stderr) == (0, "")
    assert [line for line in ending.stdout.splitlines() if len(line) > 80] == []
    first, _, last = ending.stdout.partition("Now 7 ways to decode")
    assert "def get_db():" in first
    assert first.count("|") > 1
    headed, table = last.split("\n\n")[1:3]
    assert "model.generate" in headed.splitlines()[0]
    assert "identical text" in headed.splitlines()[0]
    assert len(table.splitlines()) == 8
    assert "One turn: too few for intervals" in ending.stdout
    assert "(" not in headed + table
    assert "selfspec generate MODEL --draft lookup+int8" in last


@pytest.mark.tools
def test_where_cores_are_busy_it_compares_less_and_says_so(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.cli.demo._show", lambda *_: 10.0)
    ending = invoke("demo", "--seconds", "6", "--threads", "1")
    assert (ending.status, ending.stderr) == (0, "")
    assert [line for line in ending.stdout.splitlines() if len(line) > 80] == []
    assert "Now 3 ways to decode" in ending.stdout
    table = [line.split()[0] for line in ending.stdout.split("\n\n")[-3].splitlines()]
    assert table == ["times", "model.generate", "plain", "lookup+int8"]
    assert "some drafts were left out" in ending.stdout


@pytest.mark.tools
def test_tokens_that_differ_fail_it(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "compare", lambda *_: TextAgreement(4, 3))
    ending = invoke(*QUICK, "--output", "json")
    found = json.loads(ending.stdout)
    assert ending.status == 1
    assert not found["identical"]
    assert "TEXT DIFFERS" in found["headline"]
    assert found["error"]["type"] == "TokensDifferError"
    assert ending.stderr.startswith("error: greedy tokens of model.generate, plain")


@pytest.mark.parametrize(("speed", "said"), [(2.14, "2.1x faster than"), (0.97, "0.97x the speed of")])
def test_the_headline_claims_no_more_than_was_measured(speed: float, said: str) -> None:
    score = Score(Estimate(speed, speed, speed), 1.0, 3.12, 0.01, 1.0)
    line = f"{said} model.generate, 3.1 tokens per pass, identical text"
    assert headline(Standing("exit:4", score, score), identical=True) == line


def test_peak_memory_sees_what_was_freed_again() -> None:
    peak = peak_memory(lambda: torch.ones(2**24).sum(), torch.device("cpu"))
    if peak is None:
        pytest.skip("this system does not tell")
    assert 0.8 * 2**26 < peak < 4 * 2**26
