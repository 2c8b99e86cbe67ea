"""Options of studies and searches."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Models = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="MODEL", help="A folder, a hub name, or demo; may be given several times."),
]
Drafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        metavar="DRAFT",
        help="exits, layers, sublayers, random:4x20 (20 sets of 4 sublayers), heads:FOLDER, or a draft by name; may be "
        "given several times.",
    ),
]
Workloads = Annotated[
    list[str] | None,
    typer.Option("--workload", metavar="WORKLOAD", help="demo, or NAME=FILE of prompts; may be given several times."),
]
Temperatures = Annotated[
    list[float] | None, typer.Option("--temperature", help="0 decodes greedily; may be given several times.")
]
Rules = Annotated[
    list[str] | None, typer.Option("--accept", metavar="RULE", help="Acceptance rule of what is confirmed.")
]
DraftLengths = Annotated[
    list[int] | None, typer.Option("--draft-length", help="Draft length to choose from; may be given several times.")
]
Seeds = Annotated[list[int] | None, typer.Option("--seed", help="Of sampled texts; may be given several times.")]
Texts = Annotated[int | None, typer.Option("--texts", help="Texts of each workload.")]
PromptTokens = Annotated[int | None, typer.Option("--prompt-tokens", help="Tokens of each prompt.")]
NewTokens = Annotated[int | None, typer.Option("--max-new-tokens", help="Tokens that each text goes on for.")]
Reach = Annotated[
    int | None, typer.Option("--reach", help="Positions of a draft that estimates tell apart; each costs a pass.")
]
Confirm = Annotated[
    int | None, typer.Option("--confirm", help="Drafts of each text and temperature to confirm by real generation.")
]
Pricing = Annotated[
    Literal["measured", "weights"] | None,
    typer.Option("--pricing", help="Costs as timed here, or by the weights that a step reads."),
]
Storage = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URL",
        help="Database that workers share, e.g. postgresql://user@host/name; default: a journal file in the folder.",
    ),
]
StudyDtype = Annotated[
    Literal["auto", "float32", "float64", "bfloat16", "float16"] | None,
    typer.Option("--dtype", help="What to compute in; default: float32."),
]
StudyDevice = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...; auto: a GPU where there is one.")]
