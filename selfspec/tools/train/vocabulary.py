"""A reduced vocabulary: the tokens that are the most frequent in a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from selfspec.errors import TrainingError
from selfspec.files.writing import check_output_file, whole
from selfspec.model.checkpoint import load_tokenizer, read_config
from selfspec.model.summary import describe_config
from selfspec.tools.train.corpus import Blocks, packed, read_documents


@dataclass(frozen=True)
class Counted:
    """Tokens counted in a text.

    Attributes:
        tokens: the most frequent ones, ascending by id.
        coverage: share of the text that they make up.
        vocabulary: tokens that the model has.
    """

    tokens: tuple[int, ...]
    coverage: float
    vocabulary: int


def most_frequent(text: Blocks, size: int, vocabulary: int) -> Counted:
    """The `size` most frequent tokens of a text; among equals, those of smaller id.

    Raises:
        TrainingError: `size` is not in 1..vocabulary.
    """
    if not 1 <= size <= vocabulary:
        raise TrainingError(f"a reduced vocabulary of {size} tokens is out of range: this model has {vocabulary}")
    counts = torch.bincount(text.ids.flatten(), minlength=vocabulary)
    chosen = counts.argsort(descending=True, stable=True)[:size]
    return Counted(tuple(chosen.sort().values.tolist()), float(counts[chosen].sum() / counts.sum()), vocabulary)


def count_vocabulary(model: str, text: Sequence[Path], size: int, to: Path) -> Counted:
    """Count the tokens of a text, and write the most frequent ones as JSON.

    Args:
        model: folder or hub name; only its configuration and tokenizer are read.
        text: files.
        size: tokens to keep.
        to: the file to write.

    Raises:
        TrainingError: the file exists already, or `size` is out of range.
        StorageError: it cannot be written.
        CheckpointError, CorpusError: the model or a text cannot be read.
    """
    check_output_file(to)
    if to.exists():
        raise TrainingError(f"{to} exists; give another name with --to")
    rows = describe_config(read_config(model)).vocabulary
    documents = [document for file in text for document in read_documents(file)]
    counted = most_frequent(packed(documents, load_tokenizer(model), 1), size, rows)
    with whole(to) as draft:
        draft.write_text(json.dumps({"coverage": counted.coverage, "tokens": list(counted.tokens)}) + "\n", "utf-8")
    return counted
