"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

OutputFormat = Literal["text", "json"]
"""What a command prints."""

Output = Annotated[
    OutputFormat, typer.Option("--output", help="What to print; with json, stdout is one JSON object and nothing else.")
]
Dtype = Annotated[
    Literal["auto", "float32", "float64", "bfloat16", "float16"],
    typer.Option("--dtype", help="What to compute in; auto: as the checkpoint says."),
]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:1, ...; auto: a CUDA GPU where there is one, else the CPU.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads of torch; default: as many as torch chooses.")
]
Packed = Annotated[
    bool,
    typer.Option(
        "--packed",
        help="Lay weights out for oneDNN, in place of the plain ones: faster on CPUs with AVX-512, in bfloat16 most.",
    ),
]
DraftText = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="DRAFT",
        help="What drafts: `exit:4` (layers 0..3, then the head), `head:FOLDER` (a trained exit "
        "head), `skip:attn=3,5;mlp=4;layers=7-9` (all but these), `auto` (what `selfspec calibrate` found), or `none` "
        "(plain decoding); `+vocab:FILE` behind it: from a reduced vocabulary.",
    ),
]
FixedDraftLength = Annotated[int, typer.Option("--draft-length", min=1, help="Tokens drafted each round.")]
DraftLength = Annotated[
    int | None,
    typer.Option("--draft-length", min=1, help="Tokens drafted each round; default: as many as pay, or none."),
]
