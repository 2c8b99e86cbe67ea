"""More model than memory: drafts, plain streaming and accelerate's disk offload within the same budget, in turns.

    python benchmarks/widen.py MODEL --size 1.3B --to WIDE
    python benchmarks/streaming.py WIDE --memory 2GiB 3.5GiB --texts 'heldout.jsonl#kind=code' --threads 2

A checkpoint in bfloat16 has arms in planes, too; packing it is not timed, and `TMPDIR` must be on the same disk.

Linux alone. Each call is a process of its own; its peak of resident memory is read from outside while it runs, loading
included. accelerate keeps as many layers in memory as plain streaming has room for, and the system forgets the files
before each of its passes, so that all arms read from the disk: the bytes that the disk gave are counted. Tokens after
the first round are timed. `--minutes 8` ends early, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import HERE, RESULTS, equal_tokens, keep, prompts_of
from rich.progress import track

from selfspec.measure.environment import commit, environment
from selfspec.measure.estimate import Estimate
from selfspec.model.checkpoint import load_tokenizer
from selfspec.placement.plan import parse_bytes, shown_bytes

ARMS = {
    "accelerate": "accelerate, disk offload",
    "plain": "selfspec, plain",
    "drafts": "selfspec, default drafts",
    "planes-plain": "selfspec, planes, plain",
    "planes": "selfspec, planes, default drafts",
}
_MAY_GROW = {"memory", "repeats", "arms"}


@dataclass(frozen=True)
class Call:
    """Result of one process.

    Attributes:
        text: new tokens.
        seconds: of a token.
        bytes: that the disk gave, of a token.
        peak: resident memory, in bytes.
        moved: bytes of weights that a pass fetched; None: not counted.
        plan: that the model was loaded by.
        stats: of the generation; None: accelerate's.
        commit: of the code.
    """

    text: list[int]
    seconds: float
    bytes: float
    peak: int
    plan: dict[str, Any]
    stats: dict[str, Any] | None
    commit: str | None
    moved: float | None = None


def main() -> None:
    """Run the benchmark."""
    options = _options()
    tokenizer = load_tokenizer(str(options.model))
    prompt = prompts_of(options.texts, tokenizer, 1, options.context)[0][0].tolist()
    record = _begun(options, prompt)
    started = time.monotonic()
    wanted = [
        (memory, temperature, turn, arm)
        for memory in options.memory
        for temperature in options.temperatures
        for turn in range(options.repeats)
        for arm in options.arms
    ]
    for memory, temperature, turn, arm in track(wanted, "calls", transient=True):
        if time.monotonic() - started > 60 * options.minutes:
            print("not complete; run the same command to resume")
            return
        cell = _cell(record, memory, temperature)
        calls = cell["calls"].setdefault(arm, [])
        if arm in cell["refused"] or len(calls) > turn:
            continue
        found = _call(options, arm, memory, temperature, prompt)
        if isinstance(found, str):
            cell["refused"][arm] = found
        else:
            calls.append(asdict(found))
        keep(options.name, record, _report(record))
    print(_report(record))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", nargs="+", default=["2GiB"])
    parser.add_argument("--texts", required=True, metavar="FILE[#FIELD=VALUE]")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--context", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="with drafts")
    parser.add_argument("--plain-tokens", type=int, default=8, help="without")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["accelerate", "plain", "drafts"])
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no call after so long; then resume")
    parser.add_argument("--name", default="streaming", help="of the results")
    return parser.parse_args()


def _begun(options: argparse.Namespace, prompt: list[int]) -> dict[str, Any]:
    """Return what an earlier run of the same settings left, or a new record. Budgets, arms and repeats may be added.

    Model and texts count by what they hold, wherever they lie.
    """
    settings = {name: value for name, value in vars(options).items() if name not in ("model", "texts", "minutes")}
    settings["prompt"] = hashlib.sha256(str(prompt).encode()).hexdigest()
    settings["weights"] = [_digest(file) for file in sorted(options.model.glob("*.safetensors"))]
    file = RESULTS / f"{options.name}.json"
    record: dict[str, Any] = {"settings": settings, "environment": environment(torch.device("cpu")), "cells": []}
    if not file.exists():
        return record
    earlier: dict[str, Any] = json.loads(file.read_text())
    if any(earlier["settings"].get(name) != settings[name] for name in settings.keys() - _MAY_GROW):
        raise SystemExit(f"{file} was made with {earlier['settings']}, not {settings}: remove it, or choose a --name")
    return {**earlier, "settings": settings}


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _cell(record: dict[str, Any], memory: str, temperature: float) -> dict[str, Any]:
    cells: list[dict[str, Any]] = record["cells"]
    for cell in cells:
        if (cell["memory"], cell["temperature"]) == (memory, temperature):
            return cell
    cells.append({"memory": memory, "temperature": temperature, "refused": {}, "calls": {}})
    return cells[-1]


def _call(options: argparse.Namespace, arm: str, memory: str, temperature: float, prompt: list[int]) -> Call | str:
    """Decode once in another process; return why the budget is refused, where it is."""
    tokens = options.max_new_tokens if arm in ("drafts", "planes") else options.plain_tokens
    numbers = (temperature, tokens, options.threads, options.context + options.max_new_tokens)
    command = [sys.executable, HERE / "streaming_worker.py", arm, options.model, memory, *numbers]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*map(str, command)], stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(prompt))
    process.stdin.close()
    peak = 0
    while process.poll() is None:
        peak = max(peak, _peak(process.pid))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{arm} ended with status {process.returncode}; see above for why")
    found = json.loads(process.stdout.read())
    return str(found["refused"]) if "refused" in found else Call(peak=peak, commit=commit(), **found)


def _peak(pid: int) -> int:
    """Read the most memory that a process has had; 0 once it has none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except ProcessLookupError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def _report(record: dict[str, Any]) -> str:
    settings, machine = record["settings"], record["environment"]
    commits = {call["commit"] for cell in record["cells"] for made in cell["calls"].values() for call in made}
    lines = [
        "# More model than memory\n",
        f"{machine['processor']}, {settings['threads']} threads; arms in turns, each call in a process of its own; a",
        f"prompt of {settings['context']} tokens, {settings['max_new_tokens']} new with drafts and",
        f"{settings['plain_tokens']} without. Medians and their intervals. *Read*: by the disk's count. *Peak*:",
        "resident memory, loading included, from outside. *Equal*: tokens before one that is not the first arm's, of",
        f"those that both have. At commit {', '.join(sorted(map(str, commits)))}.",
    ]
    for cell in sorted(record["cells"], key=lambda cell: (parse_bytes("memory", cell["memory"]), cell["temperature"])):
        turns = max(map(len, cell["calls"].values()), default=0)
        lines.append(f"\n## {cell['memory']}, temperature {cell['temperature']:g}, {turns} repeats\n")
        lines += [f"{ARMS[arm]}: {why}\n" for arm, why in cell["refused"].items()]
        lines += _rows(cell)
    return "\n".join(lines) + "\n"


def _rows(cell: dict[str, Any]) -> Iterator[str]:
    """Yield the table of a cell, over the turns that all its arms have."""
    turns = min((len(made) for made in cell["calls"].values() if made), default=0)
    calls = {arm: [Call(**call) for call in made[:turns]] for arm, made in cell["calls"].items() if made}
    if not turns:
        return
    if "drafts" in calls and (last := calls["drafts"][-1]).stats is not None and last.plan["draft_step"] is not None:
        yield (
            f"With drafts {last.plan['resident']} layers stay, {shown_bytes(last.plan['streamed'])} are streamed, "
            f"drafts are in {last.plan['format']}; predicted {last.plan['drafting']:.2f} tokens/s; "
            f"{last.stats['mean_accepted_length']:.1f} tokens a pass.\n"
        )
    greedy = cell["temperature"] == 0
    others = [arm for arm in ("plain", "accelerate", "drafts") if arm in calls]
    against = [f"against {arm}" for arm in others]
    columns = ["", "tokens/s", *against, "fetched a pass", "read a token", "peak", *["equal"] * greedy]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    speeds = {arm: [1 / call.seconds for call in made] for arm, made in calls.items()}
    first = next(iter(calls.values()))[0].text
    for arm, made in calls.items():
        ratios = [
            Estimate.of_median([one / base for one, base in zip(speeds[arm], speeds[other], strict=True)]).shown(2)
            for other in others
        ]
        moved = made[-1].moved
        peak = max(call.peak for call in made)
        share = peak / parse_bytes("memory", cell["memory"])
        cells = [ARMS[arm], Estimate.of_median(speeds[arm]).shown(2), *ratios]
        cells += ["" if moved is None else shown_bytes(moved), shown_bytes(max(call.bytes for call in made))]
        cells += [f"{shown_bytes(peak)}, {share:.0%} of the budget"]
        cells += [str(min(equal_tokens(call.text, first) for call in made))] * greedy
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
