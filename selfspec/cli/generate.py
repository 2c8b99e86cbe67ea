"""`selfspec generate`: continue a prompt, printing the text as it is committed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.draft_option import parse_draft
from selfspec.cli.options import Device, DraftLength, DraftText, Dtype, Output, Packed, Threads
from selfspec.cli.prompt_option import read_prompt
from selfspec.cli.sampling_option import read_sampling
from selfspec.cli.shaping_option import read_shaping
from selfspec.cli.terminal import require_colours


def generate(
    model: Annotated[
        str,
        typer.Option("--model", help="A folder with config.json, model.safetensors and tokenizer.json; or a hub name."),
    ],
    prompt: Annotated[str | None, typer.Option("--prompt", help="The text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="A file with the text to continue, less its last line break.")
    ] = None,
    draft: DraftText = "none",
    draft_length: DraftLength = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="The most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0: always the likeliest token (greedy).")] = 0.0,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Sample from the likeliest tokens that make up this probability.")
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", help="Sample from tokens at least this likely, relative to the likeliest."),
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1: tokens of the text so far are less likely.")
    ] = 1.0,
    no_repeat_ngram_size: Annotated[
        int, typer.Option("--no-repeat-ngram-size", help="No run of so many tokens comes twice; 0: any may.")
    ] = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End after this string. May be given several times.")
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(
            "--accept",
            metavar="RULE",
            help="How drafts are judged: token, block, coupled; relaxed-typical and relaxed-top-k are faster, and the "
            "text is then no longer the model's own. Default: block where tokens are sampled, else token.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Repeats a sampled text on the same machine; default: a new one each time."),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    packed: Packed = False,
    show_drafts: Annotated[
        bool,
        typer.Option(
            "--show-drafts",
            help="Colour the text by where it came from, rejected draft tokens included; json: list rounds.",
        ),
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print what was counted, as a table on stderr.")] = False,
    output: Output = "text",
) -> None:
    """Continue a prompt. Without --prompt and --prompt-file it is read from standard input.

    Only the new text is printed. The command line alone says how to sample; the checkpoint's own sampling defaults are
    not used.
    """
    sampling = read_sampling(temperature, top_k, top_p, min_p, seed)
    shaping = read_shaping(repetition_penalty, no_repeat_ngram_size, stop)
    drafter = parse_draft(draft)
    text = read_prompt(prompt, prompt_file)
    if show_drafts and output == "text":
        require_colours(sys.stdout)

    from selfspec.cli.generate_run import Job, run

    job = Job(
        model=model,
        prompt=text,
        draft=draft.strip(),
        drafter=drafter,
        draft_length=draft_length,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        shaping=shaping,
        accept=accept,
        dtype=dtype,
        device=device,
        threads=threads,
        packed=packed,
        show_drafts=show_drafts,
        stats=stats,
        output=output,
    )
    run(job)
