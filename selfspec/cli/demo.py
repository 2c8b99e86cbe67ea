"""`selfspec demo`: plain decoding and self-speculation side by side, on the embedded model."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
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
from selfspec.cli.terminal import StepBar, by_depth, console, figures_table, progress_bar
from selfspec.errors import DraftConfigError, UnsupportedOptionError
from selfspec.measure.embedded import DEMO, model_place

if TYPE_CHECKING:
    from rich.table import Table

    from selfspec.model.checkpoint import Checkpoint


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
    from selfspec.tools.bench.arms import ArmSpec
    from selfspec.tools.bench.demo import demonstrate

    prepare_process(threads)
    checkpoint = load_checkpoint(model_place(DEMO), "float32", device)
    prompts, draft = [checkpoint.encode(text) for text in PROMPTS], runs.draft.strip()
    with progress_bar("measuring") as progress:
        bar = StepBar(progress)
        # Two temperatures, and three arms.
        bar.begin(2 * 3 * len(prompts) * (1 + runs.repeats))
        greedy, sampled = (
            demonstrate(
                checkpoint.model,
                prompts,
                ArmSpec("draft", draft, length=runs.draft_length),
                runs.max_new_tokens,
                temperature,
                runs.repeats,
                partial(bar.step, ""),
            )
            for temperature in (0.0, runs.temperature)
        )
    identical = greedy.identical
    texts = [
        {
            "prompt": prompt,
            "identical": same,
            "token_ids": {name: call.rows[0] for name, call in zip(greedy.arms, calls, strict=True)},
            "text": _continuation(checkpoint, prompt, calls[-1].rows[0]),
        }
        for prompt, same, *calls in zip(
            PROMPTS, identical, *(run.calls[0] for run in greedy.arms.values()), strict=True
        )
    ]
    result: dict[str, Any] = {
        "settings": {
            "model": "embedded pycode10M, taught to exit early",
            **asdict(runs),
            "draft": draft,
            "dtype": str(checkpoint.model.dtype).removeprefix("torch."),
            "device": str(checkpoint.model.device),
            "threads": torch.get_num_threads(),
        },
        "texts": texts,
        "identical": all(identical),
        "greedy": greedy.to_dict(),
        "sampled": sampled.to_dict(),
        "versions": versions(),
    }
    if output == "text":
        _print(checkpoint, result)
    if not all(identical):
        differing = [prompt for prompt, same in zip(PROMPTS, identical, strict=True) if not same]
        message = f"tokens differ for {', '.join(map(repr, differing))}; please report this as a bug"
        raise FailedRunError(TokensDifferError(message), result)
    if output == "json":
        print_json(result)


def _print(checkpoint: Checkpoint, result: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    out, same, settings = console(), result["identical"], result["settings"]
    table = Table("plain decoding", "self-speculation", show_lines=True, expand=True)
    for each in result["texts"]:
        prompt, plain = each["prompt"], _continuation(checkpoint, each["prompt"], each["token_ids"]["plain"])
        table.add_row(*(Text.assemble((prompt, "bold"), text) for text in (plain, each["text"])))
    out.print(table)
    out.print("All tokens are identical." if same else "TOKENS DIFFER.", style="bold green" if same else "bold red")
    for title, found in (("greedy", "greedy"), (f"temperature {settings['temperature']:g}", "sampled")):
        out.print("", _measurements(title, result[found]), result[found]["verdict"], sep="\n")
    out.print()
    out.print(
        f"Draft {settings['draft']}, draft length {settings['draft_length'] or 'as pays'}, "
        f"{result['greedy']['drafting']['new_tokens']} tokens, {settings['repeats']} repeats, {settings['device']}, "
        f"{settings['threads']} threads. Acceptance by position: share of the judged draft tokens. In cycles: share of "
        "the tokens in passages that repeat themselves, which flatter any draft.",
        style="dim",
    )


def _measurements(title: str, found: dict[str, Any]) -> Table:
    arms = [found[name] for name in ("model_generate", "plain", "drafting")]
    table = figures_table(None, [title], (arm["name"] for arm in arms))
    speeds, totals = [arm["tokens_per_second"] for arm in arms], [arm["total"] for arm in arms]
    ranges = (f"{each['median']:.0f} ({each['lowest']:.0f}-{each['highest']:.0f})" for each in speeds)
    table.add_row("tokens/s, median and range", *ranges)
    table.add_row("in cycles", *(f"{arm['cycle_share']:.0%}" for arm in arms))
    table.add_row(
        "mean accepted length", *(f"{each['mean_accepted_length']:.2f}" if each else "1.00" for each in totals)
    )
    depths = (by_depth(each["accepted_per_depth"], each["judged_per_depth"]) if each else "-" for each in totals)
    table.add_row("acceptance by depth", *depths)
    return table


def _continuation(checkpoint: Checkpoint, prompt: str, tokens: list[int]) -> str:
    from selfspec.cli.text_stream import continuation

    return continuation(checkpoint.tokenizer, checkpoint.tokenizer(prompt).input_ids, tokens)
