"""More model than memory: drafts, plain streaming and accelerate's disk offload within the same budget, in turns.

    python benchmarks/widen.py MODEL --size 1.3B --to WIDE
    python benchmarks/streaming.py WIDE --memory 2GiB 3.5GiB --texts 'heldout.jsonl#kind=code' --threads 2
    python benchmarks/streaming.py MODEL --memory all --arms stock upper --temperatures 0 --context 1000 \
        --max-new-tokens 256 --texts heldout.jsonl

A checkpoint in bfloat16 has arms in planes, too; they are packed once, to a folder beside it. Of a quantised one
accelerate offloads `--dense`, the same weights made dense: libraries offload none in fewer bits.

Linux alone. Each call is a process of its own, whose peak of resident memory the system counts, loading included.
accelerate keeps as many layers in memory as plain streaming has room for, and the system forgets the files
before each of its passes, so that all arms read from the disk: the bytes that the disk gave are counted. Tokens after
the first round are timed. Each call is a run of the lab: `--minutes 8` ends early, and the same command goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from harness import HERE, RESULTS, JsonWorker, equal_tokens, prompts_of
from rich.progress import track

import selfspec
from selfspec.measure.environment import environment
from selfspec.measure.estimate import Estimate
from selfspec.model.checkpoint import load_tokenizer
from selfspec.placement.plan import parse_bytes, shown_bytes
from selfspec.tools.lab.report import markdown_table
from selfspec.tools.lab.runs import Row, Run, Runs, digest_of

ARMS = {
    "accelerate": "accelerate, disk offload",
    "plain": "selfspec, plain",
    "drafts": "selfspec, default drafts",
    "planes-plain": "selfspec, planes, plain",
    "planes": "selfspec, planes, default drafts",
    "stock": "model.generate, in memory",
    "upper": "selfspec, planes in memory, upper",
}
_AGAINST = ("plain", "accelerate", "drafts", "stock")
_PACKED, _WITH_DRAFTS = ("planes-plain", "planes", "upper"), ("drafts", "planes", "stock", "upper")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", nargs="+", default=["2GiB"], help="budgets; all: for what is in memory whole")
    parser.add_argument("--texts", required=True, metavar="FILE[#FIELD=VALUE]")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--context", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="with drafts")
    parser.add_argument("--plain-tokens", type=int, default=8, help="without")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dense", type=Path, help="what accelerate offloads; without it MODEL")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["accelerate", "plain", "drafts"])
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no call after so long; then resume")
    parser.add_argument("--name", default="streaming", help="of the folder of results")
    options = parser.parse_args()
    runs, started = Runs(RESULTS / options.name), time.monotonic()
    tokenizer = load_tokenizer(str(options.model))
    prompt = prompts_of(options.texts, tokenizer, 1, options.context)[0][0].tolist()
    around = {**environment(torch.device("cpu")), "threads": options.threads}
    # Model and texts count by what they hold, wherever they lie.
    under = {name: getattr(options, name) for name in ("context", "max_new_tokens", "plain_tokens", "threads")}
    under |= {"prompt": digest_of(prompt), "weights": _digests(options.model)}
    under |= {} if options.dense is None else {"dense": _digests(options.dense)}
    places = range(len(options.arms))
    wanted = [*product(options.memory, options.temperatures, range(options.repeats), places)]
    for memory, temperature, turn, place in track(wanted, "calls", transient=True):
        # Disks are quicker after a rest: each arm begins a turn in its turn.
        arm = options.arms[(turn + place) % len(places)]
        how = {"memory": memory, "temperature": temperature, "turn": turn, "arm": arm}
        run = Run("streamed", {**under, **how}, {"model": options.model.name})
        if run in runs:
            continue
        if time.monotonic() - started > 60 * options.minutes:
            print("not complete; run the same command to resume")
            return
        runs.keep(run.rows([_call(options, arm, memory, temperature, prompt)], around))
        page = report(runs.measured("streamed"))
        (RESULTS / options.name / "report.md").write_text(page, encoding="utf-8")
    print(report(runs.measured("streamed")))


def _digests(folder: Path) -> list[str]:
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            found.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return found


def _call(options: argparse.Namespace, arm: str, memory: str, temperature: float, prompt: list[int]) -> Row:
    """Decode once in another process; return what it says, and the most memory that it had."""
    tokens = options.max_new_tokens if arm in _WITH_DRAFTS else options.plain_tokens
    folder = options.dense or options.model if arm == "accelerate" else options.model
    if arm in _PACKED:
        folder = options.model.with_name(options.model.name + "-planes")
        if not folder.exists():
            selfspec.pack(options.model, to=folder)
            # What is still being written would be read more slowly.
            os.sync()
    numbers = (temperature, tokens, options.threads, options.context + options.max_new_tokens)
    worker = JsonWorker([sys.executable, HERE / "streaming_worker.py", arm, folder, memory, *numbers])
    found = worker.ask({"ids": prompt})
    worker.end()
    return found


def _bytes(memory: str) -> float:
    return math.inf if memory == "all" else parse_bytes("memory", memory)


def report(rows: Sequence[Row]) -> str:
    """Return a page with a table for each budget and temperature, over the turns that all its arms have."""
    first = rows[0]
    parts = [
        "# More model than memory",
        f"{first['processor']}, {first['threads']} threads; arms in turns, each call in a process of its own; a prompt "
        f"of {first['context']} tokens, {first['max_new_tokens']} new with drafts and {first['plain_tokens']} without. "
        "Medians and their intervals. *Read*: by the disk's count. *Peak*: resident memory, loading included. "
        "*Equal*: tokens before one that is not the first arm's, of those that both have. At commit "
        f"{', '.join(sorted({str(row['commit']) for row in rows}))}.",
        *(["accelerate offloads the same weights made dense."] if first.get("dense") else []),
    ]
    cells = dict.fromkeys((row["memory"], row["temperature"]) for row in rows)
    for memory, temperature in sorted(cells, key=lambda cell: (_bytes(cell[0]), cell[1])):
        calls: dict[str, list[Row]] = {}
        refused = {}
        for row in rows:
            if (row["memory"], row["temperature"]) == (memory, temperature):
                if "refused" in row:
                    refused[row["arm"]] = row["refused"]
                else:
                    calls.setdefault(row["arm"], []).append(row)
        turns = min(map(len, calls.values()), default=0)
        parts.append(f"## {memory}, temperature {temperature:g}, {turns} repeats")
        parts += [f"{ARMS[arm]}: {why}" for arm, why in refused.items()]
        if turns:
            parts += _table({arm: made[:turns] for arm, made in calls.items()}, memory, temperature == 0)
    return "\n\n".join(parts) + "\n"


def _table(calls: dict[str, list[Row]], memory: str, greedy: bool) -> Iterator[str]:
    last = calls.get("drafts", [{}])[-1]
    if (plan := last.get("plan") or {}) and plan["draft_step"] is not None:
        yield (
            f"With drafts {plan['resident']} layers stay, {shown_bytes(plan['streamed'])} are streamed, drafts are in "
            f"{plan['format']}; predicted {plan['drafting']:.2f} tokens/s; {last['stats']['mean_accepted_length']:.1f} "
            "tokens a pass."
        )
    speeds = {arm: [1 / call["seconds"] for call in made] for arm, made in calls.items()}
    others, text = [arm for arm in _AGAINST if arm in calls], next(iter(calls.values()))[0]["text"]
    rows = []
    for arm, made in calls.items():
        ratios: list[Any] = [zip(speeds[arm], speeds[other], strict=True) for other in others]
        moved, peak = made[-1]["moved"], max(call["peak_bytes"] for call in made)
        cells = [ARMS[arm], Estimate.of_median(speeds[arm]).shown(2)]
        cells += [Estimate.of_median([one / base for one, base in pairs]).shown(2) for pairs in ratios]
        cells += ["" if moved is None else shown_bytes(moved), shown_bytes(max(call["bytes"] for call in made))]
        cells.append(f"{shown_bytes(statistics.median(call['bytes'] / call['seconds'] for call in made))}/s")
        cells.append(shown_bytes(peak) + (f", {peak / _bytes(memory):.0%} of the budget" if memory != "all" else ""))
        cells += [str(min(equal_tokens(call["text"], text) for call in made))] * greedy
        rows.append(cells)
    against = [f"against {arm}" for arm in others]
    heads = ["", "tokens/s", *against, "fetched a pass", "read a token", "disk", "peak", *["equal"] * greedy]
    yield markdown_table(heads, rows)


if __name__ == "__main__":
    main()
