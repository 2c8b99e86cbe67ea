"""More model than memory: drafts, plain streaming and accelerate's disk offload within the same budget, in turns.

    python benchmarks/widen.py MODEL --size 1.3B --to WIDE
    python benchmarks/streaming.py WIDE --memory 2GiB --held-out FILE --threads 2
    python benchmarks/streaming.py WIDE --memory 0.5GiB 1GiB 2GiB 3GiB 4GiB 5GiB --held-out FILE --threads 2 \
        --arms plain drafts --name streaming_curve --picture

Linux alone. Each call is a process of its own; its peak of resident memory is read from outside while it runs, loading
included. accelerate keeps as many layers in memory as plain streaming has room for, and the system forgets the files
before each of its passes, so that all arms read from the disk: the bytes that the disk gave are counted. How fast it
gives them changes, so 1 GiB is read directly right before each call and right after it. Tokens after the first round
are timed. Efficiency is what was reached of the formula: tokens a pass, by these two readings of the disk and the
bandwidth of memory that was measured when the model was loaded, over one target pass and the draft steps that it took.
`--minutes 8` ends early, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from kept import RESULTS
from rich.progress import track

from selfspec.environment import commit, environment
from selfspec.files.writing import write_json
from selfspec.measure.estimate import Estimate
from selfspec.measure.palette import GREY, STYLE, Mark, mark_of
from selfspec.measure.prompts import parse_workloads
from selfspec.model.checkpoint import load_tokenizer
from selfspec.placement.byte_size import parse_bytes, shown_bytes

ARMS = {"accelerate": "accelerate, disk offload", "plain": "selfspec, plain", "drafts": "selfspec, default drafts"}
_MARKS = {"accelerate": Mark(GREY, "h"), "plain": mark_of(None), "drafts": mark_of("lookup+int8")}
_MAY_GROW = {"memory", "repeats", "arms"}


@dataclass(frozen=True)
class Call:
    """What one process gave.

    Attributes:
        text: new tokens.
        seconds: of a token.
        bytes: that the disk gave, of a token.
        peak: resident memory, in bytes.
        plan: that the model was loaded by.
        stats: of the generation; None: accelerate's.
        rounds: that were timed.
        tokens: that they committed.
        steps: draft steps of these.
        disk: bytes that the disk gave in a second right before and right after; None: it was not asked.
        commit: of the code.
    """

    text: list[int]
    seconds: float
    bytes: float
    peak: int
    plan: dict[str, Any]
    stats: dict[str, Any] | None
    rounds: int
    tokens: int
    steps: int
    disk: list[float] | None
    commit: str | None

    @property
    def efficiency(self) -> float:
        """Tokens a second by those that the formula gives for what was accepted."""
        planned, streamed = 1 / self.plan["plain"], self.plan["streamed"]
        memory, at_load = self.plan["bandwidth"]["memory"], self.plan["bandwidth"]["stream"]
        disk = at_load if self.disk is None else statistics.mean(self.disk)
        target = planned + streamed / min(memory, disk) - streamed / min(memory, at_load)
        draft = planned * (self.plan["draft_step"] or 0)
        predicted: float = self.tokens / (self.rounds * target + self.steps * draft)
        return 1 / (self.seconds * predicted)

    def reading(self, disk: list[float]) -> float:
        """Bytes that the disk gave in a second, by those that it gives to who does nothing else."""
        return self.bytes / self.seconds / statistics.mean(disk)


def main() -> None:
    """Run the benchmark."""
    options = _options()
    texts = parse_workloads(f"code={options.held_out}#kind=code")[0]
    tokenizer = load_tokenizer(str(options.model))
    prompt = next(iter(texts.prompts(tokenizer, 1, 1, options.context)))[0].tolist()
    record = _begun(options)
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
        write_json(RESULTS / f"{options.name}.json", record)
        (RESULTS / f"{options.name}.md").write_text(_report(record))
    if options.picture:
        _draw(record, RESULTS / f"{options.name}.png")
    print(_report(record))


def _begun(options: argparse.Namespace) -> dict[str, Any]:
    """What an earlier run of the same settings left, or a new record. Budgets, arms and repeats may be added."""
    places = ("model", "held_out", "minutes", "picture")
    settings = {name: value for name, value in vars(options).items() if name not in places}
    file = RESULTS / f"{options.name}.json"
    record: dict[str, Any] = {"settings": settings, "environment": environment(torch.device("cpu")), "cells": []}
    if not file.exists():
        return record
    earlier: dict[str, Any] = json.loads(file.read_text())
    if any(earlier["settings"][name] != settings[name] for name in settings.keys() - _MAY_GROW):
        raise SystemExit(f"{file} was made with {earlier['settings']}, not {settings}: remove it, or choose a --name")
    return {**earlier, "settings": settings}


def _cell(record: dict[str, Any], memory: str, temperature: float) -> dict[str, Any]:
    for cell in record["cells"]:
        if (cell["memory"], cell["temperature"]) == (memory, temperature):
            found: dict[str, Any] = cell
            return found
    record["cells"].append({"memory": memory, "temperature": temperature, "refused": {}, "calls": {}})
    return _cell(record, memory, temperature)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", nargs="+", default=["2GiB"])
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--context", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="with drafts")
    parser.add_argument("--plain-tokens", type=int, default=8, help="without")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no call after so long; then resume")
    parser.add_argument("--picture", action="store_true", help="draw tokens a second over budgets")
    parser.add_argument("--name", default="streaming", help="of the results")
    return parser.parse_args()


def _place(cell: dict[str, Any]) -> tuple[int, float]:
    return parse_bytes("memory", cell["memory"]), cell["temperature"]


def _arms(cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What each arm gave; in turns that all arms have."""
    turns = min((len(made) for made in cell["calls"].values() if made), default=0)
    calls = {arm: [Call(**call) for call in made[:turns]] for arm, made in cell["calls"].items() if made}
    speeds = {arm: [1 / call.seconds for call in made] for arm, made in calls.items()}
    reference = next(iter(calls.values()))[0].text if calls else []
    return {
        arm: {
            "tokens/s": Estimate.of_median(speeds[arm]),
            **{
                f"against {other}": Estimate.of_median(
                    [one / base for one, base in zip(speeds[arm], speeds[other], strict=True)]
                )
                for other in ("plain", "accelerate")
                if other in speeds
            },
            **({} if arm == "accelerate" else {"efficiency": Estimate.of_median([call.efficiency for call in made])}),
            **_of_disk(made),
            "bytes": max(call.bytes for call in made),
            "peak": max(call.peak for call in made),
            "equal": min(_equal(call.text, reference) for call in made),
            "last": made[-1],
        }
        for arm, made in calls.items()
    }


def _of_disk(made: list[Call]) -> dict[str, Any]:
    """How fast the disk was, and how much of that each call used; nothing where it was not asked."""
    asked = [(call, call.disk) for call in made if call.disk is not None]
    if not asked:
        return {}
    return {
        "disk": Estimate.of_median([statistics.mean(disk) / 1e9 for _, disk in asked]),
        "reading": Estimate.of_median([call.reading(disk) for call, disk in asked]),
    }


def _equal(text: list[int], other: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))))


def _call(options: argparse.Namespace, arm: str, memory: str, temperature: float, prompt: list[int]) -> Call | str:
    """Decode once in another process; why the budget is refused, where it is."""
    tokens = options.max_new_tokens if arm == "drafts" else options.plain_tokens
    context = options.context + options.max_new_tokens
    script = str(Path(__file__).with_name("streaming_worker.py"))
    numbers = map(str, (temperature, tokens, options.threads, context))
    command = [sys.executable, script, arm, str(options.model), memory, *numbers]
    before = _disk(options.model)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
    if "refused" in found:
        return str(found["refused"])
    return Call(peak=peak, disk=[before, _disk(options.model)], commit=commit(), **found)


def _disk(folder: Path) -> float:
    """Bytes that the disk gives in a second, directly: 1 GiB of the weights in pieces of 32 MiB, from any place on."""
    file = max(folder.glob("*.safetensors"), key=lambda each: each.stat().st_size)
    size, piece = file.stat().st_size, 1 << 25
    total = min(size // piece, 32) * piece
    opened, memory = os.open(file, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, piece)
    try:
        start = int(torch.randint((size - total) // piece + 1, ())) * piece
        # The first read waits for memory, too.
        os.preadv(opened, [memory], start)
        begun = time.perf_counter()
        read = sum(os.preadv(opened, [memory], place) for place in range(start, start + total, piece))
        return read / (time.perf_counter() - begun)
    finally:
        os.close(opened)


def _peak(pid: int) -> int:
    """The most memory that a process has had; 0 once it has none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except ProcessLookupError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def _report(record: dict[str, Any]) -> str:
    settings, machine = record["settings"], record["environment"]
    lines = [
        "# More model than memory\n",
        f"{machine['processor']}, {settings['threads']} threads; arms in turns, each call in a",
        f"process of its own; a prompt of {settings['context']} tokens, {settings['max_new_tokens']} new with drafts",
        f"and {settings['plain_tokens']} without. Medians and their intervals. *Read*: by the disk's count. *Peak*:",
        "resident memory, loading included, from outside. *Equal*: tokens before one that is not the first arm's,",
        "of those that both have. *Disk*: GB/s of direct reads right before and after. *Reading*: bytes a second that",
        "the arm got from the disk, of these. *Efficiency*: of the formula by these, for the tokens a pass that were",
        "accepted; where they are missing, by what the disk gave when the model was loaded. At "
        f"{', '.join(_commits(record))}.",
    ]
    for cell in sorted(record["cells"], key=_place):
        turns = max(map(len, cell["calls"].values()), default=0)
        lines.append(f"\n## {cell['memory']}, temperature {cell['temperature']:g}, {turns} repeats\n")
        lines += [f"{ARMS[arm]}: {why}\n" for arm, why in cell["refused"].items()]
        arms = _arms(cell)
        if not arms:
            continue
        last = arms["drafts"]["last"] if "drafts" in arms else None
        if last is not None and last.plan["draft_step"] is not None:
            lines.append(
                f"With drafts {last.plan['resident']} layers stay, {shown_bytes(last.plan['streamed'])} are streamed, "
                f"drafts have {last.plan['bits']} bits; predicted {last.plan['drafting']:.2f} tokens/s; "
                f"{last.stats['mean_accepted_length']:.1f} tokens a pass.\n"
            )
        greedy = cell["temperature"] == 0
        columns = ["tokens/s", "against plain", "against accelerate", "efficiency", "disk", "reading"]
        others = ["read a token", "peak", *["equal"] * greedy]
        lines.append("| | " + " | ".join(columns + others) + " |")
        lines.append("|---" * (1 + len(columns) + len(others)) + "|")
        for arm, found in arms.items():
            cells = [ARMS[arm], *(found[key].shown(2) if key in found else "" for key in columns)]
            share = found["peak"] / parse_bytes("memory", cell["memory"])
            cells += [shown_bytes(found["bytes"]), f"{shown_bytes(found['peak'])}, {share:.0%} of the budget"]
            cells += [str(found["equal"])] * greedy
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _commits(record: dict[str, Any]) -> list[str]:
    """Of the code that gave these results."""
    calls = [call for cell in record["cells"] for made in cell["calls"].values() for call in made]
    return sorted({f"commit {call['commit']}" for call in calls})


def _draw(record: dict[str, Any], file: Path) -> None:
    """Draw tokens a second over budgets, a panel for each temperature."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    ordered = sorted(record["cells"], key=_place)
    temperatures = sorted({cell["temperature"] for cell in ordered})
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(temperatures), 3.6), layout="constrained")
        panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
        for panel, temperature in zip(panels, temperatures, strict=True):
            cells = [cell for cell in ordered if cell["temperature"] == temperature]
            for arm, title in ARMS.items():
                taken = [(cell, found[arm]["tokens/s"]) for cell in cells if arm in (found := _arms(cell))]
                if not taken:
                    continue
                rates = [rate for _, rate in taken]
                low = [rate.value - rate.low for rate in rates]
                high = [rate.high - rate.value for rate in rates]
                budgets = [parse_bytes("memory", cell["memory"]) / 2**30 for cell, _ in taken]
                panel.errorbar(budgets, [rate.value for rate in rates], (low, high), label=title, **_MARKS[arm].of_line)
            panel.set(
                title=f"temperature {temperature:g}" if temperature else "greedy", xlabel="budget, GiB", yscale="log"
            )
            panel.grid()
        # The scales are shared.
        panels[0].yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
        panels[0].set_ylabel("tokens a second")
        panels[0].legend()
        figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
