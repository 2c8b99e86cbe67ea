"""What recycling left in a file: tables of token ids, as safetensors, bound to the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from selfspec.errors import DraftConfigError
from selfspec.files.json_text import parsed
from selfspec.files.writing import whole
from selfspec.model.vocabulary import Vocabulary

_ABOUT = "candidates"
_REWRITE = "write it again: SelfSpeculative.save_candidates, or selfspec calibrate --candidates"


@dataclass(frozen=True)
class About:
    """What a file of candidates says of itself.

    Attributes:
        format: of the file.
        vocabulary: which tokens its ids are.
        candidates: kept for each context.
        longest: tokens of the longest context.
        most_bytes: of the table.
    """

    format: Literal[1]
    vocabulary: Vocabulary
    candidates: int
    longest: int
    most_bytes: int


class CandidateFile:
    """A file that `write_candidates` wrote.

    Args:
        file: safetensors; nothing is unpickled.

    Attributes:
        source: the file, for messages.
        about: what it says of itself.

    Raises:
        DraftConfigError: it is missing, truncated, foreign or of another format.
    """

    def __init__(self, file: str | Path) -> None:
        self.source = str(file)
        try:
            self._tensors = cast(Any, safe_open(self.source, framework="np"))
            self.about = parsed((self._tensors.metadata() or {}).get(_ABOUT, ""), About)
        # ValueError: it says nothing of itself, or something else.
        except (OSError, SafetensorError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DraftConfigError(f"{file} cannot be read as candidates ({reason}); {_REWRITE}") from error

    def read(self, like: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Read tables of the same names, types and shapes.

        Raises:
            DraftConfigError: the file has others, or numbers that no table has.
        """
        found = {}
        for name, values in like.items():
            try:
                array: NDArray[Any] = self._tensors.get_tensor(name)
            except SafetensorError as error:
                raise DraftConfigError(f"{self.source} lacks {name} ({error}); {_REWRITE}") from error
            if (array.dtype, array.shape) != (values.dtype, values.shape):
                raise DraftConfigError(
                    f"{self.source} holds {name} as {array.dtype} {list(array.shape)} and not as {values.dtype} "
                    f"{list(values.shape)}; {_REWRITE}"
                )
            if not self._may_be(array):
                raise DraftConfigError(f"{self.source} holds numbers in {name} that are no {name}; {_REWRITE}")
            found[name] = array
        return found

    def _may_be(self, array: NDArray[Any]) -> bool:
        if array.dtype == np.int32:
            return bool(((array >= -1) & (array < self.about.vocabulary.size)).all())
        return array.dtype == np.uint64 or bool(((array > 0) & (array < np.inf)).all())


def write_candidates(file: str | Path, about: About, tables: Mapping[str, NDArray[Any]]) -> None:
    """Write tables: the whole file or none of it.

    Raises:
        StorageError: it cannot be written.
    """
    with whole(Path(file)) as draft:
        save_file(dict(tables), draft, {_ABOUT: json.dumps(asdict(about))})
