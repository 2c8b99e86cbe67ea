"""`selfspec demo`: plain decoding and self-speculation side by side, on the embedded model."""

from __future__ import annotations

from typing import Annotated

import typer

from selfspec.cli.draft_option import parse_draft
from selfspec.cli.options import Device, DraftLength, DraftText, Output, Threads
from selfspec.errors import DraftConfigError


def demo(
    draft: DraftText = "skip:attn=0",
    draft_length: DraftLength = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=2, help="The most tokens to generate for each story.")
    ] = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often each way of decoding is timed.")] = 3,
    device: Device = "cpu",
    threads: Threads = None,
    output: Output = "text",
) -> None:
    """Decode three stories plainly and with self-speculation, check that they are the same, and compare.

    Exit status 1 if any token differs. The embedded model is tiny: what you see here is exactness and acceptance, not
    the speed that drafting has on a large model.
    """
    drafter = parse_draft(draft)
    if drafter is None:
        raise DraftConfigError(
            "the demo compares drafting with plain decoding; give --draft exit:E or --draft skip:..."
        )

    from selfspec.cli.demo_run import Job, run

    run(Job(draft.strip(), drafter, draft_length, max_new_tokens, repeats, device, threads, output))
