"""`selfspec index`: sort a corpus by its contexts, for drafts that look up what followed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.options import ModelOptions
from selfspec.cli.terminal import counting_bar

# Documents given to the tokenizer at once.
_BATCH = 64


@dataclass(frozen=True)
class Indexed:
    """`selfspec index`."""

    file: str
    tokens: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.file}: {self.tokens:,} tokens, {self.bytes:,} bytes, in {self.seconds:.1f} s; "
            f"use it with --draft suffix:{self.file}"
        )


def index(
    model: ModelOptions,
    text: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="Text, or JSONL with `text`, plain or as .gz; may be repeated."),
    ],
    to: Annotated[Path, typer.Option(metavar="FILE", help="Where the corpus goes: safetensors.")],
) -> Indexed:
    """Sort a corpus by its contexts, for `--draft suffix:FILE`: what followed there is drafted, several ways at once.

    The file takes 8 bytes a token, is read as far as searches go, and holds for models with this tokenizer.
    """
    from selfspec.draft.suffixes import write_corpus
    from selfspec.files.writing import check_output_file
    from selfspec.model.identity import Vocabulary
    from selfspec.tools.train.corpus import plain_text, read_documents

    check_output_file(to)
    documents = [plain_text(document) for file in text for document in read_documents(file)]
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
    return Indexed(str(to), tokens, to.stat().st_size, time.perf_counter() - began)
