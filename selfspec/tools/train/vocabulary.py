"""A reduced vocabulary: the tokens that are the most frequent in a text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from selfspec.errors import TrainingError
from selfspec.files.writing import check_output_file, whole
from selfspec.tools.train.corpus import Blocks


@dataclass(frozen=True)
class Counted:
    """Tokens counted in a text.

    Attributes:
        tokens: the most frequent ones, ascending by id.
        coverage: share of the text that they make up.
    """

    tokens: tuple[int, ...]
    coverage: float


def most_frequent(text: Blocks, size: int, vocabulary: int) -> Counted:
    """The `size` most frequent tokens of a text; among equals, those of smaller id.

    Raises:
        TrainingError: `size` is not in 1..vocabulary.
    """
    if not 1 <= size <= vocabulary:
        raise TrainingError(f"a reduced vocabulary of {size} tokens is out of range: this model has {vocabulary}")
    counts = torch.bincount(text.ids.flatten(), minlength=vocabulary)
    chosen = counts.argsort(descending=True, stable=True)[:size]
    return Counted(tuple(chosen.sort().values.tolist()), float(counts[chosen].sum() / counts.sum()))


def check_vocabulary_file(file: Path) -> None:
    """Refuse, before any work, a file that no vocabulary could be written to.

    Raises:
        TrainingError: the file exists already.
        StorageError: it cannot be written.
    """
    check_output_file(file)
    if file.exists():
        raise TrainingError(f"{file} exists; give another name with --to")


def write_vocabulary(counted: Counted, file: Path) -> None:
    """Write it as JSON.

    Raises:
        TrainingError: the file exists already.
        StorageError: it cannot be written.
    """
    check_vocabulary_file(file)
    with whole(file) as draft:
        draft.write_text(json.dumps({"coverage": counted.coverage, "tokens": list(counted.tokens)}) + "\n", "utf-8")
