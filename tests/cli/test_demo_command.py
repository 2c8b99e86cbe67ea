"""`selfspec demo`: three ways to decode agree, and what it says of their speed is what it measured."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from helpers import tiny
from helpers.running import Invoke
from selfspec.decode.stats import Stats
from selfspec.measure.embedded import PROMPTS
from selfspec.measure.peak_memory import peak_memory
from selfspec.measure.timing import Call
from selfspec.tools.bench import demo as measuring
from selfspec.tools.bench.arms import ArmSpec, StockArm
from selfspec.tools.bench.demo import Demonstration
from selfspec.tools.bench.measure import ArmRun

QUICK = ["demo", "--max-new-tokens", "8", "--repeats", "1"]


def test_json(invoke: Invoke) -> None:
    ending = invoke(*QUICK, "--repeats", "2", "--draft", "exit:3", "--draft-length", "2", "--output", "json")
    found = json.loads(ending.stdout)
    assert ending.status == 0
    assert found["identical"]
    assert [text["prompt"] for text in found["texts"]] == list(PROMPTS)
    for text in found["texts"]:
        ids = text["token_ids"]
        assert ids["plain"] == ids["drafting"] == ids["model_generate"]
        assert len(ids["plain"]) == 8
    for mode, arm in itertools.product(("greedy", "sampled"), ("model_generate", "plain", "drafting")):
        speed = found[mode][arm]["tokens_per_second"]
        assert len(speed["repeats"]) == 2
        assert 0 < speed["lowest"] <= speed["median"] <= speed["highest"]
        assert 0 <= found[mode][arm]["cycle_share"] <= 1
    assert len(found["greedy"]["drafting"]["total"]["accepted_per_depth"]) == 2
    assert (found["settings"]["draft"], found["settings"]["repeats"]) == ("exit:3", 2)


@pytest.mark.parametrize("same", [True, False])
def test_text(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    monkeypatch.setattr(measuring, "demonstrate", lambda *_: measured([10.0, 11.0], [12.0, 13.0], same=same))
    ending = invoke(*QUICK)
    assert ending.status == (0 if same else 1)
    for said in ("plain decoding", "self-speculation", "tokens/s, median", "Drafting paid"):
        assert said in ending.stdout
    assert ("All tokens are identical." in ending.stdout) == same
    assert ending.stderr.startswith("" if same else "error: tokens differ for")
    assert ending.stderr.count("\n") == (0 if same else 1)


def test_tokens_that_differ_fail_it(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "demonstrate", lambda *_: measured([10.0], [12.0], same=False))
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


def measured(plain: list[float], drafting: list[float], judged: int = 30, same: bool = True) -> Demonstration:
    """A demonstration with these speeds: 10 rounds that commit 30 tokens, 20 of them accepted of `judged`."""
    stats = Stats(rounds=10, row_rounds=10, new_tokens=30, drafted=30)
    stats.accepted_per_depth, stats.judged_per_depth = [20], [judged]
    stats.seconds = {"draft": 3.0, "verify": 1.0}

    def arm(spec: ArmSpec, speeds: list[float], token: int = 5, counts: Stats | None = None) -> ArmRun:
        rows = [[token] * 8]
        calls = [[Call(rows, 8 / speed, 0.1, 1, 8, counts) for _ in PROMPTS] for speed in speeds]
        return ArmRun(StockArm(spec, tiny.llama()), calls=calls)

    arms = {
        "model_generate": arm(ArmSpec("generate"), [1.0], 5 if same else 6),
        "plain": arm(ArmSpec("plain"), plain),
        "drafting": arm(ArmSpec("draft", "exit:4"), drafting, counts=stats),
    }
    return Demonstration(arms)


def test_verdict_when_it_paid() -> None:
    assert measured([10.0, 11.0], [12.0, 13.0]).verdict.startswith("Drafting paid on this machine: 1.19 times")


def test_verdict_within_the_noise() -> None:
    assert measured([10.0, 12.0], [11.5, 13.0]).verdict.startswith("Drafting made no clear difference")


def test_verdict_when_it_did_not_pay_says_what_a_round_cost() -> None:
    said = measured([10.0], [5.0], judged=50).verdict
    assert "0.50 times the speed of selfspec plain" in said
    # A round commits 3 tokens at half the speed.
    assert "commits 3.00 tokens but costs 6.00 plain steps (acceptance rate 0.40)" in said


def test_peak_memory_sees_what_was_freed_again() -> None:
    peak = peak_memory(lambda: torch.ones(2**24).sum(), torch.device("cpu"))
    if peak is None:
        pytest.skip("this system does not tell")
    assert 0.8 * 2**26 < peak < 4 * 2**26
