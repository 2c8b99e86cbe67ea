"""`selfspec verify`: show on a checkpoint of one's own that drafting does not change what the model says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.options import Device, Dtype, Output, Packed, Threads, read_draft
from selfspec.cli.verify_prompts import read_prompts
from selfspec.errors import DraftConfigError

if TYPE_CHECKING:
    from selfspec.control.profile import Profile
    from selfspec.draft import Drafter


def verify(
    model: Annotated[
        str, typer.Argument(help="A folder with config.json, model.safetensors and tokenizer.json; or a hub name.")
    ],
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            metavar="DRAFT",
            help="What drafts, `exit:4`, `skip:attn=3,5;mlp=4;layers=7-9` or `auto`; may be given several times. "
            "Default: a spread chosen from the depth.",
        ),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept",
            metavar="RULE",
            help="Acceptance rule; may be given several times. Default: all lossless ones, `token`, `block` and "
            "`coupled`. A relaxed rule is not exact, which then shows.",
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="A file with one prompt a line; default: built-in prompts.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=2, help="Length of each text, in tokens.")
    ] = 64,
    draft_length: Annotated[int, typer.Option(min=1, metavar="N", help="Draft N tokens a round.")] = 4,
    samples: Annotated[
        int, typer.Option("--samples", min=100, help="Texts drawn for each test of what is sampled; more see more.")
    ] = 400,
    level: Annotated[
        float, typer.Option("--level", help="Chance that an exact model fails any of these tests (Holm's procedure).")
    ] = 0.01,
    seed: Annotated[int, typer.Option("--seed", help="Of all that is drawn.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    packed: Packed = False,
    output: Output = "text",
) -> None:
    """Verify that self-speculation leaves this model's output as it is: its tokens, and what it samples from.

    Greedy texts are compared with those of `model.generate`, and read once more through the passes that verify
    drafts. Sampled texts are compared with plain decoding at the same seed, and tested against the model's own
    distribution. What rounding does to the logits is measured, and only what it explains is excused.

    Exit status 0: EXACT, or EXACT WITHIN ROUNDING. 1: NOT EXACT.
    """
    drafters = None if draft is None else [_parsed(text) for text in draft]
    texts = None if prompt_file is None else read_prompts(prompt_file)

    from selfspec.cli.verify_run import Job, run
    from selfspec.tools.verify import Settings

    given = Settings(max_new_tokens=max_new_tokens, draft_length=draft_length, samples=samples, level=level, seed=seed)
    settings = given if accept is None else replace(given, rules=tuple(accept))
    run(Job(model, drafters, texts, settings, dtype, device, threads, packed, output))


def _parsed(text: str) -> Drafter | Profile | str:
    drafter = read_draft(text)
    if drafter is None:
        raise DraftConfigError("plain decoding is always verified; give --draft exit:E or --draft skip:...")
    return drafter
