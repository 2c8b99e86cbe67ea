"""More model than memory: drafts, plain streaming and accelerate's disk offload within the same budget, in turns.

    python benchmarks/widen.py MODEL --size 1.3B --to WIDE
    python benchmarks/streaming.py WIDE --memory 2GiB --held-out FILE --threads 2
    python benchmarks/streaming.py WIDE --memory 0.5GiB 1GiB 2GiB 3GiB 4GiB 5GiB --held-out FILE --threads 2 \
        --arms plain drafts --name streaming_curve --picture

Linux alone. Each call is a process of its own; its peak of resident memory is read from outside while it runs, loading
included. accelerate keeps as many layers in memory as plain streaming has room for, and the system forgets the files
before each of its passes, so that all arms read from the disk: the bytes that the disk gave are counted. Tokens after
the first round are timed. Efficiency is what was reached of the formula: tokens a pass, by the bandwidths that were
measured when the model was loaded, over one target pass and the draft steps that it took.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from kept import RESULTS
from rich.progress import track

from selfspec.environment import environment
from selfspec.measure.estimate import Estimate
from selfspec.measure.prompts import parse_workloads
from selfspec.model.checkpoint import load_tokenizer
from selfspec.placement.byte_size import parse_bytes, shown_bytes

ARMS = {"accelerate": "accelerate, disk offload", "plain": "selfspec, plain", "drafts": "selfspec, default drafts"}


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

    @property
    def efficiency(self) -> float:
        """Tokens a second by those that the formula gives for what was accepted."""
        cost = 1 + self.steps / self.rounds * (self.plan["draft_step"] or 0)
        predicted: float = self.plan["plain"] * self.tokens / self.rounds / cost
        return 1 / (self.seconds * predicted)


def main() -> None:
    """Run the benchmark."""
    options = _options()
    texts = parse_workloads(f"code={options.held_out}#kind=code")[0]
    tokenizer = load_tokenizer(str(options.model))
    prompt = next(iter(texts.prompts(tokenizer, 1, 1, options.context)))[0].tolist()
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    settings = {name: value for name, value in settings.items() if name not in ("model", "held_out")}
    record: dict[str, Any] = {"settings": settings, "environment": environment(torch.device("cpu")), "cells": []}
    for memory in options.memory:
        for temperature in options.temperatures:
            record["cells"].append(_measured(options, memory, temperature, prompt))
            (RESULTS / f"{options.name}.json").write_text(json.dumps(record, indent=1) + "\n")
            (RESULTS / f"{options.name}.md").write_text(_report(record))
    if options.picture:
        _draw(record, RESULTS / f"{options.name}.png")
    print(_report(record))


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
    parser.add_argument("--picture", action="store_true", help="draw tokens a second over budgets")
    parser.add_argument("--name", default="streaming", help="of the results")
    return parser.parse_args()


def _measured(options: argparse.Namespace, memory: str, temperature: float, prompt: list[int]) -> dict[str, Any]:
    calls: dict[str, list[Call]] = {}
    refused: dict[str, str] = {}
    for _ in track(range(options.repeats), f"{memory}, T {temperature:g}", transient=True):
        for arm in options.arms:
            if arm not in refused:
                found = _call(options, arm, memory, temperature, prompt)
                if isinstance(found, str):
                    refused[arm] = found
                else:
                    calls.setdefault(arm, []).append(found)
    speeds = {arm: [1 / call.seconds for call in made] for arm, made in calls.items()}
    reference = next(iter(calls.values()))[0].text if calls else []
    return {
        "memory": memory,
        "temperature": temperature,
        "refused": refused,
        "arms": {
            arm: {
                "tokens_per_second": Estimate.of_median(speeds[arm]).to_dict(),
                **{
                    f"against {other}": Estimate.of_median(
                        [one / base for one, base in zip(speeds[arm], speeds[other], strict=True)]
                    ).to_dict()
                    for other in ("plain", "accelerate")
                    if other in speeds
                },
                **(
                    {}
                    if arm == "accelerate"
                    else {"efficiency": Estimate.of_median([call.efficiency for call in made]).to_dict()}
                ),
                "bytes_per_token": max(call.bytes for call in made),
                "peak": max(call.peak for call in made),
                "equal_tokens": min(_equal(call.text, reference) for call in made),
                "plan": made[-1].plan,
                "stats": made[-1].stats,
            }
            for arm, made in calls.items()
        },
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
    return str(found["refused"]) if "refused" in found else Call(peak=peak, **found)


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
        f"{machine['processor']}, {settings['threads']} threads, {settings['repeats']} repeats in turns, each in a",
        f"process of its own; a prompt of {settings['context']} tokens, {settings['max_new_tokens']} new with drafts",
        f"and {settings['plain_tokens']} without. Medians and their intervals. *Read*: by the disk's count. *Peak*:",
        "resident memory, loading included, from outside. *Equal*: tokens before one that is not the first arm's,",
        "of those that both have. *Efficiency*: of the formula, for the tokens a pass that were accepted.",
    ]
    for cell in record["cells"]:
        lines.append(f"\n## {cell['memory']}, temperature {cell['temperature']:g}\n")
        lines += [f"{ARMS[arm]}: {why}\n" for arm, why in cell["refused"].items()]
        if not cell["arms"]:
            continue
        if (drafts := cell["arms"].get("drafts")) is not None and drafts["plan"]["draft_step"] is not None:
            plan = drafts["plan"]
            lines.append(
                f"With drafts {plan['resident']} layers stay, {shown_bytes(plan['streamed'])} are streamed, drafts "
                f"have {plan['bits']} bits; predicted {plan['drafting']:.2f} tokens/s; "
                f"{drafts['stats']['mean_accepted_length']:.1f} tokens a pass.\n"
            )
        greedy = cell["temperature"] == 0
        columns = ["tokens/s", "against plain", "against accelerate", "efficiency", "read a token", "peak"]
        lines.append("| | " + " | ".join(columns + ["equal"] * greedy) + " |")
        lines.append("|---" * (1 + len(columns) + greedy) + "|")
        for arm, found in cell["arms"].items():
            keys = ("tokens_per_second", "against plain", "against accelerate", "efficiency")
            cells = [ARMS[arm], *(Estimate(**found[key]).shown(2) if key in found else "" for key in keys)]
            cells += [shown_bytes(found["bytes_per_token"]), shown_bytes(found["peak"])]
            cells += [str(found["equal_tokens"])] * greedy
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _draw(record: dict[str, Any], file: Path) -> None:
    """Draw tokens a second over budgets, a panel for each temperature."""
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(cell["temperature"] for cell in record["cells"]))
    figure = Figure(figsize=(4.2 * len(temperatures), 3.6), layout="constrained")
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for panel, temperature in zip(panels, temperatures, strict=True):
        cells = [cell for cell in record["cells"] if cell["temperature"] == temperature]
        for arm, title in ARMS.items():
            taken = [cell for cell in cells if arm in cell["arms"]]
            if not taken:
                continue
            rates = [Estimate(**cell["arms"][arm]["tokens_per_second"]) for cell in taken]
            low = [rate.value - rate.low for rate in rates]
            high = [rate.high - rate.value for rate in rates]
            budgets = [parse_bytes("memory", cell["memory"]) / 2**30 for cell in taken]
            panel.errorbar(budgets, [rate.value for rate in rates], (low, high), marker="o", markersize=3, label=title)
        panel.set(title=f"temperature {temperature:g}" if temperature else "greedy", xlabel="budget, GiB", yscale="log")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens a second")
    panels[0].legend(fontsize=8)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
