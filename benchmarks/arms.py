"""What the benchmarks share: ways to decode, run in turns on the same prompts, and the table of what they did."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rich.progress
import torch
import transformers
from torch import Tensor

import selfspec
from selfspec.cycles import cycle_share

RESULTS = Path(__file__).parent / "results"


@dataclass
class Arm:
    """One way to decode.

    Attributes:
        name: what the table calls it.
        run: decodes a prompt, `[batch, prompt]`, in the given repeat; returns the new tokens of each row.
        tokens_per_second: one figure per repeat, over all prompts.
        stats: of selfspec's arms, one for each prompt and repeat.
        equal: whether every token equals the first arm's.
        cycle_shares: of each prompt and repeat, the share of new tokens in passages that repeat themselves.
    """

    name: str
    run: Callable[[Tensor, int], list[list[int]]]
    tokens_per_second: list[float] = field(default_factory=list)
    stats: list[selfspec.Stats] = field(default_factory=list)
    equal: bool = True
    cycle_shares: list[float] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float | None:
        """Share of judged draft tokens that were accepted, over everything."""
        judged = sum(each.judged for each in self.stats)
        return sum(each.accepted for each in self.stats) / judged if judged else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens committed per target pass of a row, over everything."""
        rounds = sum(each.row_rounds for each in self.stats)
        return sum(each.new_tokens for each in self.stats) / rounds if rounds else None


def wrapped(name: str, spec: selfspec.SelfSpeculative, options: dict[str, Any]) -> Arm:
    """An arm of selfspec's. Sampling is seeded by the repeat."""

    def run(ids: Tensor, repeat: int) -> list[list[int]]:
        output = spec.generate(ids, seed=repeat, **options)
        arm.stats.append(output.stats)
        return new_tokens(output.sequences, ids)

    arm = Arm(name, run)
    return arm


def new_tokens(sequences: Tensor, prompt: Tensor) -> list[list[int]]:
    """What was generated after a prompt, row by row."""
    tokens: list[list[int]] = sequences[:, prompt.shape[1] :].tolist()
    return tokens


def measure(arms: Sequence[Arm], prompts: Sequence[Tensor], repeats: int) -> None:
    """Run every arm on every prompt, in turns, `repeats` times after a warm-up."""
    reference: dict[tuple[int, int], list[list[int]]] = {}
    with rich.progress.Progress() as progress:
        task = progress.add_task("measuring", total=(repeats + 1) * len(arms) * len(prompts))
        for repeat in range(repeats + 1):
            for arm in arms:
                seconds, tokens = 0.0, 0
                for number, ids in enumerate(prompts):
                    started = time.perf_counter()
                    rows = arm.run(ids, repeat)
                    seconds += time.perf_counter() - started
                    tokens += sum(map(len, rows))
                    arm.cycle_shares += [cycle_share(row) for row in rows]
                    arm.equal &= rows == reference.setdefault((repeat, number), rows)
                    progress.advance(task)
                if repeat:
                    arm.tokens_per_second.append(tokens / seconds)


def table(arms: Sequence[Arm]) -> str:
    """A Markdown table: the speed of each arm, and its ratio to the first one's, repeat by repeat."""
    lines = [
        f"| | tokens/s, median (range) | against {arms[0].name} | acceptance rate | mean accepted length | in cycles |",
        "|---|---|---|---|---|---|",
    ]
    for arm in arms:
        pairs = zip(arm.tokens_per_second, arms[0].tokens_per_second, strict=True)
        rate, length = arm.acceptance_rate, arm.mean_accepted_length
        lines.append(
            f"| {arm.name} | {_spread(arm.tokens_per_second, '.0f')} | {_spread([a / b for a, b in pairs], '.2f')} "
            f"| {'' if rate is None else f'{rate:.2f}'} | {'' if length is None else f'{length:.2f}'} "
            f"| {statistics.mean(arm.cycle_shares):.0%} |"
        )
    return "\n".join(lines)


def save(name: str, settings: dict[str, Any], arms: Sequence[Arm]) -> None:
    """Write the figures as JSON and the table as Markdown, and print the table."""
    record = {
        "settings": settings,
        "versions": versions(),
        "machine": machine(),
        "arms": [
            {
                "name": arm.name,
                "equal": arm.equal,
                "tokens_per_second": arm.tokens_per_second,
                "acceptance_rate": arm.acceptance_rate,
                "mean_accepted_length": arm.mean_accepted_length,
                "cycle_share": statistics.mean(arm.cycle_shares),
            }
            for arm in arms
        ],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(table(arms) + "\n")
    print(table(arms))


def versions() -> dict[str, str]:
    """Versions of what ran."""
    return {
        "selfspec": selfspec.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def machine() -> dict[str, str | int]:
    """What it ran on."""
    return {"processor": _processor(), "threads": torch.get_num_threads()}


def _spread(values: Sequence[float], digits: str) -> str:
    return f"{statistics.median(values):{digits}} ({min(values):{digits}}-{max(values):{digits}})"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
