"""A reduced vocabulary: the tokens that are the most frequent in a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from selfspec.errors import TrainingError
from selfspec.files.writing import check_output_file, write_sealed
from selfspec.model.checkpoint import load_tokenizer, read_config
from selfspec.model.summary import describe_config
from selfspec.tools.train.corpus import packed, read_documents


def most_frequent(ids: Tensor, size: int, vocabulary: int) -> Tensor:
    """The `size` most frequent of token ids, ascending, of a model with `vocabulary`; among equals the smaller."""
    if not 1 <= size <= vocabulary:
        raise TrainingError(f"a reduced vocabulary of {size} tokens is out of range: this model has {vocabulary}")
    counts = torch.bincount(ids.flatten(), minlength=vocabulary)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def count_vocabulary(model: str, text: Sequence[Path], size: int, to: Path) -> float:
    """Count the tokens of a text, write the `size` most frequent ones as JSON, and return their share of the text.

    Only the configuration and the tokenizer of the model are read.
    """
    check_output_file(to)
    if to.exists():
        raise TrainingError(f"{to} exists; give another name with --to")
    rows = describe_config(read_config(model)).vocabulary
    documents = [document for file in text for document in read_documents(file)]
    ids = packed(documents, load_tokenizer(model), 1).ids
    tokens = most_frequent(ids, size, rows)
    coverage = float(torch.isin(ids, tokens).double().mean())
    write_sealed(to, {"coverage": coverage, "tokens": tokens.tolist()})
    return coverage
