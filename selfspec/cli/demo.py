"""`selfspec demo`: plain decoding and self-speculation side by side, on the embedded model."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from selfspec.cli.options import Device, Draft, DraftLength, Output, Threads, read_draft
from selfspec.errors import DraftConfigError, UnsupportedOptionError


def demo(
    draft: Draft = "lookup+exit:4",
    draft_length: DraftLength = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=2, help="Tokens to generate for each text.")
    ] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="Of the sampled runs, above 0.")] = 0.8,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often each way of decoding is timed.")] = 3,
    device: Device = "cpu",
    threads: Threads = None,
    output: Output = "text",
) -> None:
    """Go on with four Python files plainly and with self-speculation, check that all is the same, and compare speed.

    Greedy first, then sampled. Exit status 1 if any greedy token differs. The embedded model has 10M parameters and was
    taught to exit early (see its MODEL_CARD.md).
    """
    if not 0 < temperature < math.inf:
        raise UnsupportedOptionError(f"--temperature {temperature:g} does not sample; give one above 0, e.g. 0.8")
    drafter = read_draft(draft)
    if drafter is None:
        raise DraftConfigError(
            "the demo compares drafting with plain decoding; give --draft exit:E or --draft skip:..."
        )

    from selfspec.cli.demo_run import Job, run

    run(Job(draft.strip(), drafter, draft_length, max_new_tokens, temperature, repeats, device, threads, output))
