"""Corpus files: token ids and the order of their contexts, as safetensors, bound to the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from selfspec.draft.text_places import NONE, SortedCorpus, Tokens, sorted_ends
from selfspec.errors import DraftConfigError
from selfspec.files.described_tensors import DescribedTensors, write_described
from selfspec.model.vocabulary import Vocabulary

_ABOUT = "corpus"
_REWRITE = "write it again: selfspec index"
LONGEST = 16
"""Tokens of a context that places are sorted by."""


@dataclass(frozen=True)
class _About:
    """Describes a corpus file."""

    format: Literal[2]
    vocabulary: Vocabulary


class CorpusFile(DescribedTensors[_About]):
    """Reads a corpus that `write_corpus` wrote. It is mapped into memory, and searches read only the parts they need.

    Attributes:
        corpus: the corpus to search.

    Raises:
        DraftConfigError: the file is missing, truncated, damaged, foreign or of another format.
    """

    def __init__(self, file: str | Path) -> None:
        super().__init__(file, "a corpus", _ABOUT, _About, _REWRITE)
        self.check_names(("tokens", "ends"))
        tokens, ends = self.read("tokens"), self.read("ends")
        within = _is_within(tokens, NONE) and _is_within(ends, 1, len(tokens))
        if not within or len(ends) != len(tokens):
            raise DraftConfigError(f"{file} holds no corpus of token ids and their order; {_REWRITE}")
        self.corpus = SortedCorpus(tokens.numpy(), ends.numpy())

    def check(self, vocabulary: Vocabulary) -> None:
        """Refuse the corpus for a model with other tokens.

        Raises:
            DraftConfigError: the tokens differ.
        """
        if not self.about.vocabulary.is_same(vocabulary):
            raise DraftConfigError(
                f"{self.source} holds token ids of another tokenizer than the model's; {_REWRITE} MODEL with this model"
            )


def _is_within(numbers: Tensor, least: int, most: int | None = None) -> bool:
    if numbers.dtype != torch.int32 or numbers.ndim != 1 or not len(numbers):
        return False
    smallest, largest = numbers.aminmax()
    return least <= int(smallest) and (most is None or int(largest) <= most)


def write_corpus(file: str | Path, texts: Iterable[Sequence[int]], vocabulary: Vocabulary) -> int:
    """Write a corpus of texts, given as token ids, in one piece or not at all; return the number of its tokens.

    Raises:
        DraftConfigError: the texts hold no tokens.
        StorageError: the file cannot be written.
    """
    between = np.array([NONE], dtype=np.int32)
    parts: list[Tokens] = [each for text in texts for each in (np.asarray(text, dtype=np.int32), between)]
    tokens = np.concatenate(parts) if parts else between
    if len(tokens) == len(parts) // 2:
        raise DraftConfigError("a corpus needs texts with tokens; give others")
    ends = sorted_ends(tokens, LONGEST)
    parts_of_it = {"tokens": torch.from_numpy(tokens), "ends": torch.from_numpy(ends)}
    write_described(Path(file), _ABOUT, asdict(_About(2, vocabulary)), parts_of_it)
    return len(tokens) - len(parts) // 2
