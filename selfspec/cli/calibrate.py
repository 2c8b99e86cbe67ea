"""`selfspec calibrate`: find the draft that decodes fastest here, for `draft="auto"`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.calibrate_prompts import read_prompts
from selfspec.cli.options import Device, Dtype, Output, Packed, Threads, read_draft
from selfspec.errors import DraftConfigError

if TYPE_CHECKING:
    from selfspec.draft.along_path import PathDrafter


def calibrate(
    model: Annotated[
        str, typer.Argument(help="A folder with config.json, model.safetensors and tokenizer.json; or a hub name.")
    ],
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            metavar="DRAFT",
            help="A path to consider, `exit:4`, `head:FOLDER` or `skip:layers=7-9`; may be given several times. "
            "Default: every exit. Look-ups, alone and before a path, and plain decoding are always considered.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Texts like those to be generated, from their beginnings: one a line, or .jsonl with `prompt` or "
            "`text`. Default: built-in ones.",
        ),
    ] = None,
    most_prompts: Annotated[int, typer.Option("--most-prompts", min=1, help="Prompts of the file to use.")] = 4,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=8, help="Length of each text, in tokens.")
    ] = 48,
    temperature: Annotated[float, typer.Option("--temperature", help="At which sampling is measured.")] = 0.8,
    longest_draft: Annotated[int, typer.Option("--longest-draft", min=1, help="The most tokens of a draft.")] = 7,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts that are generated at once.")] = 1,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="How often the fastest candidates are timed on each prompt.")
    ] = 3,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FILE",
            help="Where the profile goes, for `--draft auto:FILE`. Default: where `--draft auto` finds it, the folder "
            "in SELFSPEC_PROFILES or one in the user's cache.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of what is sampled.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    packed: Packed = False,
    output: Output = "text",
) -> None:
    """Measure on this machine which draft decodes fastest, greedily and sampling, and write a profile for `auto`.

    Measured are what a draft step from each exit, a pass over several tokens and all else in a round cost, and how
    often the model accepts what each exit proposes on its own text. The best candidates then generate in turns with
    plain decoding. The profile holds for these weights, this device, dtype, number of threads and these versions.
    """
    drafters = None if draft is None else [_parsed(text) for text in draft]
    texts = None if prompts is None else read_prompts(prompts, most_prompts)

    from selfspec.cli.calibrate_run import Job, run
    from selfspec.tools.calibrate import Settings

    settings = Settings(max_new_tokens, temperature, repeats, batch, longest_draft, seed)
    run(Job(model, drafters, texts, settings, to, dtype, device, threads, packed, output))


def _parsed(text: str) -> PathDrafter:
    from selfspec.draft.along_path import PathDrafter

    drafter = read_draft(text)
    if not isinstance(drafter, PathDrafter):
        raise DraftConfigError(
            f"--draft {text} is no path of the model; look-ups and plain decoding are always considered, so name the "
            "path alone: exit:E, head:FOLDER or skip:..."
        )
    return drafter
