"""`selfspec demo`: plain decoding and self-speculation side by side, on the embedded model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli.options import (
    Device,
    Draft,
    DraftLength,
    Output,
    Repeats,
    Temperature,
    Threads,
    prepare_process,
    read_draft,
)
from selfspec.cli.outcome import FailedCheckError, FailedRunError, print_json
from selfspec.cli.terminal import by_depth, console, figures_table, progress_bar
from selfspec.errors import DraftConfigError, UnsupportedOptionError
from selfspec.measure.embedded import DEMO, model_place

if TYPE_CHECKING:
    from rich.table import Table

    from selfspec.model.checkpoint import Checkpoint
    from selfspec.tools.bench.demo import Demonstration, Shown


class TokensDifferError(FailedCheckError):
    """Self-speculation gave other tokens than plain decoding: a bug of selfspec."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What is decoded and timed."""

    draft: Draft = "lookup+exit:4"
    draft_length: DraftLength = None
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Generate N tokens a text.")] = 64
    temperature: Temperature = 0.8
    repeats: Repeats = 3


def demo(runs: Runs, device: Device = "cpu", threads: Threads = None, output: Output = "text") -> None:
    """Continue four Python files with and without self-speculation: check that all tokens are the same, compare speed.

    Greedy first, then sampled. Exit status 1 if any greedy token differs. The embedded model has 10M parameters and was
    taught to exit early (see its MODEL_CARD.md).
    """
    if not 0 < runs.temperature < math.inf:
        raise UnsupportedOptionError(f"--temperature {runs.temperature:g} does not sample; give one above 0, e.g. 0.8")
    if read_draft(runs.draft) is None:
        raise DraftConfigError(
            "the demo compares drafting with plain decoding; give --draft exit:E or --draft skip:..."
        )

    import torch

    from selfspec.environment import versions
    from selfspec.measure.embedded import PROMPTS
    from selfspec.model.checkpoint import load_checkpoint
    from selfspec.tools.bench.demo import demonstrate, steps

    prepare_process(threads)
    checkpoint = load_checkpoint(model_place(DEMO), "float32", device)
    prompts = [checkpoint.encode(text) for text in PROMPTS]
    with progress_bar("measuring") as progress:
        bar = progress.add_task("", total=2 * steps(len(prompts), runs.repeats))
        greedy, sampled = (
            demonstrate(
                checkpoint.model,
                prompts,
                runs.draft.strip(),
                runs.draft_length,
                runs.max_new_tokens,
                temperature,
                runs.repeats,
                lambda: progress.advance(bar),
            )
            for temperature in (0.0, runs.temperature)
        )
    identical = greedy.identical
    result = {
        "settings": {
            "model": "embedded pycode10M, taught to exit early",
            **asdict(runs),
            "draft": runs.draft.strip(),
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
            for prompt, same, stock, plain, drafting in zip(
                PROMPTS, identical, *map(_first_texts, greedy.arms), strict=True
            )
        ],
        "identical": all(identical),
        "greedy": _figures(greedy, checkpoint),
        "sampled": _figures(sampled, checkpoint),
        "versions": versions(),
    }
    if output == "text":
        _print(runs, checkpoint, greedy, sampled)
    if not all(identical):
        differing = [prompt for prompt, same in zip(PROMPTS, identical, strict=True) if not same]
        message = f"tokens differ for {', '.join(map(repr, differing))}; please report this as a bug"
        raise FailedRunError(TokensDifferError(message), result)
    if output == "json":
        print_json(result)


def _figures(found: Demonstration, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "model_generate": found.stock.to_dict(),
        "plain": found.plain.to_dict(),
        "drafting": found.drafting.to_dict(),
        "speedup": found.speedup,
        "verdict": _verdict(found, checkpoint),
    }


def _verdict(found: Demonstration, checkpoint: Checkpoint) -> str:
    from selfspec.tools.bench.demo import verdict

    return verdict(found, checkpoint.model.num_parameters())


def _first_texts(arm: Shown) -> list[list[int]]:
    """The new tokens of each prompt in the first repeat."""
    return [repeats[0] for repeats in arm.texts]


def _print(runs: Runs, checkpoint: Checkpoint, greedy: Demonstration, sampled: Demonstration) -> None:
    import torch

    out, same = console(), all(greedy.identical)
    out.print(_texts(checkpoint, greedy))
    out.print("All tokens are identical." if same else "TOKENS DIFFER.", style="bold green" if same else "bold red")
    for title, found in (("greedy", greedy), (f"temperature {runs.temperature:g}", sampled)):
        out.print("", _measurements(title, found), sep="\n")
        out.print(_verdict(found, checkpoint))
    out.print()
    out.print(
        f"Draft {runs.draft.strip()}, draft length {runs.draft_length or 'as pays'}, {greedy.drafting.new_tokens} "
        f"tokens, {runs.repeats} repeats, {checkpoint.model.device}, {torch.get_num_threads()} threads. Acceptance by "
        "position: share of the judged draft tokens. In cycles: share of the tokens in passages that repeat "
        "themselves, which flatter any draft. Peak memory: above the level before, one run.",
        style="dim",
    )


def _texts(checkpoint: Checkpoint, found: Demonstration) -> Table:
    from rich.table import Table
    from rich.text import Text

    from selfspec.measure.embedded import PROMPTS

    table = Table("plain decoding", "self-speculation", show_lines=True, expand=True)
    for prompt, plain, drafting in zip(PROMPTS, _first_texts(found.plain), _first_texts(found.drafting), strict=True):
        cells = (_continuation(checkpoint, prompt, tokens) for tokens in (plain, drafting))
        table.add_row(*(Text.assemble((prompt, "bold"), cell) for cell in cells))
    return table


def _measurements(title: str, found: Demonstration) -> Table:
    table = figures_table(None, [title], (arm.name for arm in found.arms))
    quantities: dict[str, Callable[[Shown], str]] = {
        "tokens/s, median": lambda arm: f"{arm.median:.0f}",
        "tokens/s, range": lambda arm: f"{min(arm.tokens_per_second):.0f}-{max(arm.tokens_per_second):.0f}",
        "in cycles": lambda arm: f"{arm.cycle_share:.0%}",
        "mean accepted length": lambda arm: f"{arm.total.mean_accepted_length:.2f}" if arm.total else "1.00",
        "acceptance by depth": lambda arm: (
            by_depth(arm.total.accepted_per_depth, arm.total.judged_per_depth) if arm.total else "-"
        ),
        "peak memory": lambda arm: "n/a" if arm.peak_bytes is None else _kib(arm.peak_bytes),
        "KV cache": lambda arm: _kib(arm.total.cache_bytes) if arm.total else "n/a",
    }
    for quantity, shown in quantities.items():
        table.add_row(quantity, *(shown(arm) for arm in found.arms))
    return table


def _kib(number: int) -> str:
    return f"{number / 1024:,.0f} KiB"


def _continuation(checkpoint: Checkpoint, prompt: str, tokens: list[int]) -> str:
    from selfspec.cli.text_stream import continuation

    return continuation(checkpoint.tokenizer, checkpoint.tokenizer(prompt).input_ids, tokens)
