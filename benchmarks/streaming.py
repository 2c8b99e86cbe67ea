"""More model than memory: drafts, plain streaming and accelerate's disk offload within the same budget, in turns.

    python benchmarks/widen.py MODEL --size 1.3B --to WIDE
    python benchmarks/streaming.py WIDE --memory 2GiB --held-out FILE --threads 2

Linux alone. Each call is a process of its own; its peak of resident memory is read from outside while it runs, loading
included. accelerate keeps as many layers in memory as plain streaming has room for, and the system forgets the files
before each of its passes, so that all arms read from the disk: the bytes that the disk gave are counted. Tokens after
the first round are timed.
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
from selfspec.placement.byte_size import shown_bytes

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
    """

    text: list[int]
    seconds: float
    bytes: float
    peak: int
    plan: dict[str, Any]
    stats: dict[str, Any] | None


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
    parser.add_argument("--name", default="streaming", help="of the results")
    return parser.parse_args()


def _measured(options: argparse.Namespace, memory: str, temperature: float, prompt: list[int]) -> dict[str, Any]:
    calls: dict[str, list[Call]] = {arm: [] for arm in ARMS}
    for _ in track(range(options.repeats), f"{memory}, T {temperature:g}", transient=True):
        for arm in ARMS:
            calls[arm].append(_call(options, arm, memory, temperature, prompt))
    speeds = {arm: [1 / call.seconds for call in made] for arm, made in calls.items()}
    reference = calls["accelerate"][0].text
    return {
        "memory": memory,
        "temperature": temperature,
        "plan": calls["drafts"][-1].plan,
        "stats": calls["drafts"][-1].stats,
        "arms": {
            arm: {
                "tokens_per_second": Estimate.of_median(speeds[arm]).to_dict(),
                **{
                    f"against {other}": Estimate.of_median(
                        [one / base for one, base in zip(speeds[arm], speeds[other], strict=True)]
                    ).to_dict()
                    for other in ("plain", "accelerate")
                },
                "bytes_per_token": max(call.bytes for call in made),
                "peak": max(call.peak for call in made),
                "equal_tokens": min(_equal(call.text, reference) for call in made),
            }
            for arm, made in calls.items()
        },
    }


def _equal(text: list[int], other: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))))


def _call(options: argparse.Namespace, arm: str, memory: str, temperature: float, prompt: list[int]) -> Call:
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
    return Call(peak=peak, **json.loads(process.stdout.read()))


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
        "resident memory, loading included, from outside. *Equal*: tokens before the first that is not accelerate's,",
        "of those that both have.",
    ]
    for cell in record["cells"]:
        plan, stats = cell["plan"], cell["stats"]
        lines.append(f"\n## {cell['memory']}, temperature {cell['temperature']:g}\n")
        lines.append(
            f"With drafts {plan['resident']} layers stay, {shown_bytes(plan['streamed'])} are streamed, drafts have "
            f"{plan['bits']} bits; predicted {plan['drafting'] or 0:.2f} tokens/s; "
            f"{stats['mean_accepted_length']:.1f} tokens a pass.\n"
        )
        greedy = cell["temperature"] == 0
        lines.append("| | tokens/s | against plain | against accelerate | read a token | peak |" + " equal |" * greedy)
        lines.append("|---|---|---|---|---|---|" + "---|" * greedy)
        for arm, found in cell["arms"].items():
            rate, *ratios = (
                Estimate(**found[key]) for key in ("tokens_per_second", "against plain", "against accelerate")
            )
            cells = [ARMS[arm], rate.shown(2), *(ratio.shown(2) for ratio in ratios)]
            cells += [shown_bytes(found["bytes_per_token"]), shown_bytes(found["peak"])]
            cells += [str(found["equal_tokens"])] * greedy
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
