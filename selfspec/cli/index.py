"""`selfspec index`: sort a corpus by its contexts, for drafts that look up what followed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.options import ModelOptions, Output
from selfspec.cli.outcome import print_json
from selfspec.cli.terminal import console, counting_bar

# Documents given to the tokenizer at once.
_BATCH = 64


def index(
    model: ModelOptions,
    text: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="Text, or JSONL with `text`, plain or as .gz; may be repeated."),
    ],
    to: Annotated[Path, typer.Option(metavar="FILE", help="Where the corpus goes: safetensors.")],
    output: Output = "text",
) -> None:
    """Sort a corpus by its contexts, for `--draft suffix:FILE`: what followed there is drafted, several ways at once.

    The file takes 8 bytes a token, is read as far as searches go, and holds for models with this tokenizer.
    """
    from selfspec.draft.corpus_file import write_corpus
    from selfspec.files.writing import check_output_file
    from selfspec.model.vocabulary import Vocabulary
    from selfspec.tools.train.corpus import read_documents

    check_output_file(to)
    documents = [document for file in text for document in read_documents(file)]
    model.prepare()
    checkpoint = model.load()
    began = time.perf_counter()
    ids: list[list[int]] = []
    with counting_bar("tokenizing") as count:
        for start in range(0, len(documents), _BATCH):
            # Longer than the model's context, and meant to be.
            batch = checkpoint.tokenizer(documents[start : start + _BATCH], add_special_tokens=False, verbose=False)
            ids += batch["input_ids"]
            count(len(ids), len(documents))
    tokens = write_corpus(to, ids, Vocabulary.of(checkpoint.model))
    seconds, size = time.perf_counter() - began, to.stat().st_size
    if output == "json":
        print_json({"file": str(to), "tokens": tokens, "bytes": size, "seconds": seconds})
        return
    console().print(
        f"{to}: {tokens:,} tokens, {size:,} bytes, in {seconds:.1f} s; use it with --draft suffix:{to}", soft_wrap=True
    )
