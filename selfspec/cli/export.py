"""`selfspec export` and `pack`: write a draft for other engines, or a checkpoint in fewer bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.options import Dtype, Model, Output, Threads, prepare_process, read_draft
from selfspec.cli.terminal import console
from selfspec.errors import DraftConfigError
from selfspec.measure.embedded import model_place

if TYPE_CHECKING:
    from selfspec.placement.pack import PackedFolder
    from selfspec.tools.export import Exported


def export(
    model: Model,
    draft: Annotated[
        str,
        typer.Option(
            metavar="DRAFT",
            help="What to export: `exit:4`, `skip:layers=3,5` or `skip-file:FILE`.",
        ),
    ],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where it goes: a new folder.")],
    dtype: Dtype = "auto",
    threads: Threads = None,
    output: Output = "text",
) -> Exported:
    """Write the draft as a model of its own: its layers, with the model's embeddings, norm and head.

    Other engines draft with it as with any small model: they keep a second copy of its layers, and a cache for it. What
    it computes is compared with the draft before it is written. docs/other_engines.md has each engine's command.
    """
    from selfspec.draft import Drafter
    from selfspec.measure.checkpoint import load_checkpoint
    from selfspec.measure.prompts import check_reads_text
    from selfspec.model.checkpoint import read_config
    from selfspec.tools.export import check_place, export_checkpoint

    drafter = read_draft(draft)
    if not isinstance(drafter, Drafter | None):
        raise DraftConfigError(
            f"--draft {draft} is a choice among drafts; export the one that selfspec calibrate chose"
        )
    check_place(to)
    prepare_process(threads)
    place = model_place(model)
    read_config(place)
    checkpoint = load_checkpoint(place, dtype, "cpu")
    check_reads_text(checkpoint.model)
    done = export_checkpoint(checkpoint.model, checkpoint.tokenizer, drafter, to)
    if output == "text":
        console().print(
            f"{done.place}: {done.draft}, {len(done.layers)} layers, {done.parameters:,} parameters "
            f"({done.share:.0%} of the model's), {done.size:,} bytes\n"
            f"Use it with model.generate(..., assistant_model=...) on {done.place}; docs/other_engines.md has vLLM, "
            "SGLang and llama.cpp.",
            soft_wrap=True,
        )
    return done


def pack(
    model: Model,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the packed checkpoint goes: a new folder.")],
    weights: Annotated[str, typer.Option(metavar="FORMAT", help="`planes`: see docs/planes.md.")] = "planes",
    threads: Threads = None,
    output: Output = "text",
) -> PackedFolder:
    """Write a checkpoint whose weights take three quarters of the bytes of bfloat16, without losing a bit.

    Every command that takes the folder as its MODEL, and selfspec.load, map its weights: loading reads them once, and
    processes share them. The draft `upper` reads half of them. Weights have to be of bfloat16 precision, as almost all
    published ones are; others stay as they are. Stock transformers does not read the folder: keep the source for it.
    """
    from selfspec.placement.pack import pack as packed

    prepare_process(threads)
    done = packed(model_place(model), to, weights=weights)
    if output == "text":
        console().print(
            f"{done.folder}: {done.bytes:,} bytes for {done.source_bytes:,} of the source, {done.packed} weights of "
            f"{done.bits:.2f} bits, {done.kept} as they were; use it as any MODEL, also with --draft upper",
            soft_wrap=True,
        )
    return done
