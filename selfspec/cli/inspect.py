"""`selfspec inspect`: what a model is made of, and what drafting from each of its exits would read."""

from __future__ import annotations

from typing import Annotated

import typer

from selfspec.cli.options import Output


def inspect(
    model: Annotated[
        str, typer.Argument(help="A folder with config.json, model.safetensors and tokenizer.json; or a hub name.")
    ],
    output: Output = "text",
) -> None:
    """Describe a model by its parts, without loading its weights or running it.

    The draft cost ratio c is what one draft step reads by what one target step reads, head included.
    """
    from transformers.utils import logging

    from selfspec.anatomy import describe_config
    from selfspec.checkpoint import read_config
    from selfspec.cli.anatomy_tables import print_anatomy
    from selfspec.cli.json_output import print_json, versions

    logging.set_verbosity_error()
    anatomy = describe_config(read_config(model))
    if output == "json":
        print_json({"checkpoint": model, **anatomy.to_dict(), "versions": versions()})
    else:
        print_anatomy(model, anatomy)
