"""What recycling left in a file: tables of token ids, as safetensors, bound to the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from selfspec.errors import DraftConfigError
from selfspec.files.described_tensors import DescribedTensors, write_described
from selfspec.model.vocabulary import Vocabulary

_ABOUT = "candidates"
_REWRITE = "write it again: SelfSpeculative.save_memory"


@dataclass(frozen=True)
class AboutCandidates:
    """What a file of candidates says of itself: whose ids its tokens are, and the size of the table."""

    format: Literal[2]
    vocabulary: Vocabulary
    candidates: int
    longest: int
    most_bytes: int


class CandidateFile(DescribedTensors[AboutCandidates]):
    """A file that `write_candidates` wrote.

    Raises:
        DraftConfigError: it is missing, truncated, damaged, foreign or of another format.
    """

    def __init__(self, file: str | Path) -> None:
        super().__init__(file, "candidates", _ABOUT, AboutCandidates, "np", _REWRITE)

    def tables(self, like: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Read tables of the same names, types and shapes.

        Raises:
            DraftConfigError: the file has others, or numbers that no table has.
        """
        self.check_names(like)
        found = {name: self.read_like(name, values) for name, values in like.items()}
        for name, array in found.items():
            if not self._may_be(array):
                raise DraftConfigError(f"{self.source} holds numbers in {name} that are no {name}; {_REWRITE}")
        return found

    def _may_be(self, array: NDArray[Any]) -> bool:
        if array.dtype == np.int32:
            return bool(((array >= -1) & (array < self.about.vocabulary.size)).all())
        return array.dtype == np.uint64 or bool(((array > 0) & (array < np.inf)).all())


def write_candidates(file: str | Path, about: AboutCandidates, tables: Mapping[str, NDArray[Any]]) -> None:
    """Write tables: the whole file or none of it.

    Raises:
        StorageError: it cannot be written.
    """
    write_described(Path(file), _ABOUT, asdict(about), tables)
