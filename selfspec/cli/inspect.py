"""`selfspec inspect`: what a model is made of, and what drafting from each of its exits would read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from selfspec.cli.options import Output


def inspect(
    model: Annotated[
        str, typer.Argument(help="A folder with config.json, model.safetensors and tokenizer.json; or a hub name.")
    ],
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            "--draft-vocabulary", min=1, help="Also what drafts cost that read only this many rows of the head."
        ),
    ] = None,
    output: Output = "text",
) -> None:
    """Describe a model by its parts, without loading its weights or running it.

    The draft cost ratio c is what one draft step reads by what one target step reads, head included.
    """
    from transformers.utils import logging

    from selfspec.cli.json_output import print_json
    from selfspec.cli.summary_tables import print_anatomy, print_exits
    from selfspec.environment import versions
    from selfspec.measure.draft_cost import exits_reading
    from selfspec.model.checkpoint import read_config
    from selfspec.model.summary import describe_config

    logging.set_verbosity_error()
    anatomy = describe_config(read_config(model))
    reduced = None if draft_vocabulary is None else exits_reading(anatomy, draft_vocabulary)
    if output == "json":
        fewer = {} if reduced is None else {"exits_with_draft_vocabulary": [asdict(choice) for choice in reduced]}
        print_json({"checkpoint": model, **anatomy.to_dict(), **fewer, "versions": versions()})
        return
    print_anatomy(model, anatomy)
    if reduced is not None:
        print_exits(f"Draft cost of each exit with {draft_vocabulary} rows of the head", reduced)
