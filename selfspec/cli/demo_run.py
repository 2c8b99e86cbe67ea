"""The work of `selfspec demo`, apart from its options: measure, check, print."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils import logging

from selfspec.cli.options import OutputFormat
from selfspec.cli.outcome import FailedRunError, print_json
from selfspec.cli.terminal import by_position, progress_bar
from selfspec.cli.text_stream import decoded
from selfspec.control.plan import Plan
from selfspec.draft import Drafter
from selfspec.environment import versions
from selfspec.measure.embedded import PROMPTS, checkpoint_folder
from selfspec.model.checkpoint import Checkpoint, load_checkpoint
from selfspec.tools.demo.comparison import Arm, Comparison, Total, compare, runs
from selfspec.tools.demo.verdict import verdict


@dataclass(frozen=True)
class Job:
    """What the command line asked for.

    Attributes:
        draft: what drafts, as it was written.
        drafter: what drafts.
        draft_length: tokens drafted each round; None: as many as pay.
        max_new_tokens: tokens for each text.
        temperature: of the sampled runs.
        repeats: how often each way of decoding is timed.
        device: where.
        threads: CPU threads; None: torch's own choice.
        output: what stdout gets.
    """

    draft: str
    drafter: Drafter | Plan | str
    draft_length: int | None
    max_new_tokens: int
    temperature: float
    repeats: int
    device: str
    threads: int | None
    output: OutputFormat


class TokensDifferError(Exception):
    """Self-speculation gave other tokens than plain decoding: a fault of selfspec."""


def run(job: Job) -> None:
    """Measure and print.

    Raises:
        DraftConfigError, PromptError, UnsupportedOptionError: the job cannot be done; nothing was printed.
        FailedRunError: tokens differ; everything was printed.
    """
    logging.set_verbosity_error()
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    checkpoint = load_checkpoint(str(checkpoint_folder()), "float32", job.device)
    greedy, sampled = _measured(job, checkpoint)
    result = _result(job, checkpoint, greedy, sampled)
    if job.output == "text":
        _print(job, checkpoint, greedy, sampled)
    if not all(greedy.identical):
        differing = [prompt for prompt, same in zip(PROMPTS, greedy.identical, strict=True) if not same]
        raise FailedRunError(
            TokensDifferError(f"tokens differ for {', '.join(map(repr, differing))}; please report this as a bug"),
            result,
        )
    if job.output == "json":
        print_json(result)


def _measured(job: Job, checkpoint: Checkpoint) -> tuple[Comparison, Comparison]:
    """Greedy decoding, and sampling."""
    prompts = [checkpoint.encode(text) for text in PROMPTS]
    with progress_bar("measuring") as progress:
        bar = progress.add_task("", total=2 * runs(job.repeats))

        def measured(temperature: float) -> Comparison:
            return compare(
                checkpoint.model,
                prompts,
                job.drafter,
                job.draft_length,
                job.max_new_tokens,
                temperature,
                job.repeats,
                lambda: progress.advance(bar),
            )

        return measured(0.0), measured(job.temperature)


def _result(job: Job, checkpoint: Checkpoint, greedy: Comparison, sampled: Comparison) -> dict[str, Any]:
    texts = zip(PROMPTS, greedy.identical, *(arm.tokens for arm in greedy.arms), strict=True)
    return {
        "settings": {
            "model": "embedded pycode10M, taught to exit early",
            "draft": job.draft,
            "draft_length": job.draft_length,
            "max_new_tokens": job.max_new_tokens,
            "temperature": job.temperature,
            "repeats": job.repeats,
            "dtype": str(checkpoint.model.dtype).removeprefix("torch."),
            "device": str(checkpoint.model.device),
            "threads": torch.get_num_threads(),
        },
        "texts": [
            {
                "prompt": prompt,
                "identical": same,
                "token_ids": {"model_generate": stock, "plain": plain, "drafting": drafting},
                "text": _continuation(checkpoint, prompt, drafting),
            }
            for prompt, same, stock, plain, drafting in texts
        ],
        "identical": all(greedy.identical),
        "greedy": _figures(greedy, checkpoint),
        "sampled": _figures(sampled, checkpoint),
        "versions": versions(),
    }


def _figures(comparison: Comparison, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "model_generate": comparison.stock.to_dict(),
        "plain": comparison.plain.to_dict(),
        "drafting": {**comparison.drafting.to_dict(), "total": Total.of(comparison.drafting.stats).to_dict()},
        "speedup": comparison.speedup,
        "verdict": _verdict(comparison, checkpoint),
    }


def _verdict(comparison: Comparison, checkpoint: Checkpoint) -> str:
    return verdict(comparison, checkpoint.model.num_parameters())


def _print(job: Job, checkpoint: Checkpoint, greedy: Comparison, sampled: Comparison) -> None:
    console = Console(highlight=False, markup=False)
    console.print(_texts(checkpoint, greedy))
    same = all(greedy.identical)
    console.print("All tokens are identical." if same else "TOKENS DIFFER.", style="bold green" if same else "bold red")
    for title, comparison in (("greedy", greedy), (f"temperature {job.temperature:g}", sampled)):
        console.print()
        console.print(_measurements(title, comparison))
        console.print(_verdict(comparison, checkpoint))
    console.print()
    console.print(
        f"Draft {job.draft}, draft length {job.draft_length or 'as pays'}, {greedy.drafting.new_tokens} tokens, "
        f"{job.repeats} repeats, {checkpoint.model.device}, {torch.get_num_threads()} threads. Acceptance by position: "
        "share of the judged draft tokens. In cycles: share of the tokens in passages that repeat themselves, which "
        "flatter any draft. Peak memory: above the level before, one run.",
        style="dim",
    )


def _texts(checkpoint: Checkpoint, comparison: Comparison) -> Table:
    table = Table("plain decoding", "self-speculation", show_lines=True, expand=True)
    for prompt, plain, drafting in zip(PROMPTS, comparison.plain.tokens, comparison.drafting.tokens, strict=True):
        cells = (_continuation(checkpoint, prompt, tokens) for tokens in (plain, drafting))
        table.add_row(*(Text.assemble((prompt, "bold"), cell) for cell in cells))
    return table


def _measurements(title: str, comparison: Comparison) -> Table:
    table = Table(title)
    for arm in comparison.arms:
        table.add_column(arm.name, justify="right")
    quantities: dict[str, Callable[[Arm], str]] = {
        "tokens/s, median": lambda arm: f"{arm.median:.0f}",
        "tokens/s, range": lambda arm: f"{min(arm.tokens_per_second):.0f}-{max(arm.tokens_per_second):.0f}",
        "in cycles": lambda arm: f"{arm.cycle_share:.0%}",
        "mean accepted length": lambda arm: f"{Total.of(arm.stats).mean_accepted_length:.2f}" if arm.stats else "1.00",
        "acceptance by position": _acceptance,
        "peak memory": lambda arm: "n/a" if arm.peak_bytes is None else _kib(arm.peak_bytes),
        "KV cache": lambda arm: _kib(Total.of(arm.stats).cache_bytes) if arm.stats else "n/a",
    }
    for quantity, shown in quantities.items():
        table.add_row(quantity, *(shown(arm) for arm in comparison.arms))
    return table


def _acceptance(arm: Arm) -> str:
    if not arm.stats:
        return "-"
    total = Total.of(arm.stats)
    return by_position(total.accepted_per_position, total.judged_per_position)


def _kib(number: int) -> str:
    return f"{number / 1024:,.0f} KiB"


def _continuation(checkpoint: Checkpoint, prompt: str, tokens: list[int]) -> str:
    before = checkpoint.tokenizer(prompt).input_ids
    return decoded(checkpoint.tokenizer, before + tokens)[len(decoded(checkpoint.tokenizer, before)) :]
