"""README's figures: docs/claims.md has each with its command and machine, and the committed results say the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import pytest

from helpers.snippets import ROOT
from selfspec.measure.estimate import Estimate
from selfspec.tools.lab.runs import Row, Runs
from selfspec.tools.lab.table import estimate_in, records, summarise

pytest.importorskip("pandas")

RESULTS = ROOT / "benchmarks" / "results"
BEGINS_FIGURE = r"(?<![\w.:])\d[\d.,]*"


@cache
def table(folder: str) -> list[Row]:
    return records(summarise(Runs(RESULTS / folder).measured("generation")))


def said(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def over_generate(folder: str, arm: str, column: str = "whole_speedup_over_generate") -> list[Estimate]:
    """How many times as fast as `model.generate` an arm is, under each set of conditions."""
    found = [estimate_in(row, column) for row in table(folder) if row["arm"] == arm]
    return [each for each in found if each is not None]


def over_llama_cpp(folder: str, arm: str) -> list[Estimate]:
    """Whole calls over those of llama.cpp, sums of both texts: the median of the turns, and the range."""
    turns: dict[int, dict[bool, float]] = {}
    for row in Runs(RESULTS / folder).measured("generation"):
        beside = row["arm"].startswith("llama.cpp")
        if beside or row["arm"] == arm:
            seconds = turns.setdefault(row["repeat"], {True: 0.0, False: 0.0})
            seconds[beside] += row["seconds"] / row["new_tokens"]
    return [range_of([turn[True] / turn[False] for turn in turns.values()])]


def range_of(values: list[float]) -> Estimate:
    return Estimate(median(values), min(values), max(values))


def whole_calls(folder: str, arm: str) -> list[Estimate]:
    """Whole calls over those of `model.generate`, of the pages that an earlier version wrote."""
    found, column = [], 0
    for line in (RESULTS / folder / "report.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if "whole calls" in cells:
            column = cells.index("whole calls")
        elif column and cells[1:2] == [arm] and (cell := re.match(r"([\d.]+) \(([\d.]+)-([\d.]+)\)", cells[column])):
            found.append(read(cell))
        column = column if line.startswith("|") else 0
    return found


def ends_of(estimates: list[Estimate]) -> list[Estimate]:
    """The least and the largest."""
    ordered = sorted(estimates, key=lambda each: each.value)
    return [ordered[0], ordered[-1]]


def stored(found: Any) -> Estimate:
    return Estimate(found["value"], found["low"], found["high"])


def read(figure: re.Match[str]) -> Estimate:
    value, low, high = map(float, figure.groups())
    return Estimate(value, low, high)


def single(value: float) -> Estimate:
    return Estimate(value, value, value)


def beside_llama_cpp(name: str, arm: str) -> list[Estimate]:
    (model,) = said(name)["models"]
    return [stored(at[arm]["against llama.cpp F32"]) for at in model["temperatures"].values()]


def streaming() -> list[Estimate]:
    """Default drafts over accelerate at temperature 0.8, whose medians the page of the result has."""
    page = (RESULTS / "streaming.md").read_text()
    found = re.findall(r"## [\d.]+GiB, temperature 0\.8.*?\n\n.*?(?=\n## |\Z)", page, re.DOTALL)
    rows = [re.search(r"default drafts \|.*?\|.*?\| ([\d.]+) \(([\d.]+)-([\d.]+)\) \|", each) for each in found]
    return [read(row) for row in rows if row]


def device_speed() -> list[Estimate]:
    """Plain decoding over `model.generate`, prefill left out, turn by turn, from the rows of an earlier version."""
    (row, *_) = map(json.loads, (RESULTS / "smollm2_h100" / "runs.jsonl").read_text().splitlines())
    speeds: dict[str, list[float]] = {}
    for arm in row["found"]["arms"]:
        tokens, seconds = (
            [sum(whole) - sum(first) for whole, first in zip(arm[name], arm[f"first_{name}"], strict=True)]
            for name in ("tokens", "seconds")
        )
        speeds[arm["arm"]["kind"]] = [n / s for n, s in zip(tokens, seconds, strict=True)]
    return [range_of([ours / stock for ours, stock in zip(speeds["plain"], speeds["generate"], strict=True)])]


def equal_texts() -> list[Estimate]:
    arms = ("selfspec plain", "selfspec int8", "selfspec lookup+int8")
    greedy = [row for row in table("smollm2_bfloat16") if row["arm"] in arms and row["temperature"] == 0]
    return ends_of([single(round(row["equal"] * row["n"])) for row in greedy])


def bytes_in_planes() -> list[Estimate]:
    sizes = said("planes_bits")["models"]["smollm2-bf16"]
    return [single(sizes["bytes in planes"] / sizes["bytes in bfloat16"])]


def edits() -> list[Estimate]:
    seconds = said("edits")["seconds"]
    return [single(median(seconds[door]["without"]) / median(seconds[door]["with"])) for door in ("server", "Python")]


def speech() -> list[Estimate]:
    arms = said("speech")["arms"]
    times = {name: arms[name]["seconds"] for name in ("model.generate", "int8")}
    return [single(times["model.generate"][kind] / times["int8"][kind]) for kind in ("one piece", "long form")]


def behind() -> list[Estimate]:
    decoding = said("smollm2_behind_8000")["contexts"]["8000"]["decoding"]
    return [stored(decoding[at]["int8+window:512"]["against plain"]) for at in ("0", "0.8")]


# What README claims, in its words, and what the results say.
CLAIMS: dict[str, Callable[[], list[Estimate]]] = {
    "0.76 of the bytes": bytes_in_planes,
    "3.7 and 3.2 times `model.generate`": lambda: over_generate("planes_avx512_bfloat16", "planes"),
    "3.4 and 2.9": lambda: over_generate("planes_avx2_bfloat16", "planes", "speedup_over_generate"),
    "18 and 9 times accelerate's disk offload": streaming,
    "1.3 times as fast as llama.cpp's": lambda: [
        *over_llama_cpp("gguf_q8_0_avx512", "selfspec lookup"),
        *over_llama_cpp("gguf_q4_k_m_avx512", "selfspec lookup"),
    ],
    "1.0 and 1.3 with AVX2 alone": lambda: [
        *over_llama_cpp("gguf_q8_0", "selfspec lookup"),
        *over_llama_cpp("gguf_q4_k_m", "selfspec lookup"),
    ],
    "4.6 times `model.generate`, 6.2": lambda: [
        *over_generate("w4a16", "selfspec plain"),
        *over_generate("w4a16", "selfspec lookup"),
    ],
    "2.7 to 5.4 times `model.generate`": lambda: ends_of(over_generate("smollm2_bfloat16", "selfspec lookup+int8")),
    "4.9 to 7.0 in float32": lambda: ends_of(whole_calls("smollm2", "selfspec lookup+int8")),
    "1,377 of 1,377": lambda: [single(said("serving_load")["load"]["right"])],
    "3.8 times plain decoding in the server and 4.2 in Python": edits,
    "1.9 times plain decoding after 8,000 tokens, 1.8 at temperature 0.8": behind,
    "1.7 to 1.9 times `model.generate`": speech,
    "7.6 times `model.generate`": device_speed,
    "3 to 7 were `model.generate`'s": equal_texts,
    "plain decoding is 1.1": lambda: beside_llama_cpp("llama_cpp_smollm2", "selfspec plain"),
    "`int8` 2.4 times as fast at 135M": lambda: beside_llama_cpp("llama_cpp_smollm2", "selfspec int8"),
    "0.8 to 0.9": lambda: beside_llama_cpp("llama_cpp", "selfspec plain"),
    "1.6 to 1.9 times at 10M": lambda: beside_llama_cpp("llama_cpp", "selfspec int8"),
    "some twenty seconds": lambda: [single(said("first_hour")["seconds"]["first text, first comparison"]["end"])],
}
# What others measured, a run of the tests, and a condition.
NOT_MEASURED = {"1.3 to 2.2 times", "168 of 172", "10 of 200 lines"}


def prose() -> str:
    """README without its blocks of code, in one line."""
    return " ".join(re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL).split())


def claimed() -> dict[str, tuple[str, ...]]:
    """The lines of docs/claims.md: command, figure and machine of each claim."""
    rows = re.findall(r"^\| (?!claim |---)(.*) \|$", (ROOT / "docs" / "claims.md").read_text(), re.MULTILINE)
    return {claim: tuple(rest) for claim, *rest in (row.split(" | ") for row in rows)}


def shown(estimate: Estimate) -> str:
    digits = 2 if estimate.value < 100 else 0
    value = f"{estimate.value:,.{digits}f}"
    if estimate.low == estimate.high:
        return value
    return f"{value} ({estimate.low:.{digits}f}-{estimate.high:.{digits}f})"


def test_readme_and_the_page_of_claims_have_the_same() -> None:
    assert [*claimed()] == [*CLAIMS]
    assert {claim: claim in prose() for claim in CLAIMS} == dict.fromkeys(CLAIMS, True)
    left = prose()
    for claim in sorted({*CLAIMS, *NOT_MEASURED}, key=len, reverse=True):
        left = left.replace(claim, "")
    assert re.findall(rf"{BEGINS_FIGURE}(?: and [\d.]+| to [\d.]+)? times|{BEGINS_FIGURE} of [\d,]{{3,}}", left) == []


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_results_say_what_is_claimed(claim: str) -> None:
    command, figure, machine = claimed()[claim]
    estimates = CLAIMS[claim]()
    assert re.sub(r"\s*\(\[.*", "", figure) == ", ".join(map(shown, estimates))
    for number in re.findall(BEGINS_FIGURE, re.sub(r"(?:at|after|at temperature) [\d.,]+\w*", "", claim)):
        exact = number.replace(",", "").rstrip(".")
        digits = len(exact.partition(".")[2])
        assert exact in {f"{each.value:.{digits}f}" for each in estimates}, number
    assert all((ROOT / script).is_file() for script in re.findall(r"benchmarks/\w+\.py", command))
    assert machine
