"""Reading files of tensors that say in their metadata what they are: safetensors, so nothing is unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

from safetensors import SafetensorError, safe_open

from selfspec.errors import DraftConfigError
from selfspec.files.json_text import parsed

_About = TypeVar("_About")
_Array = TypeVar("_Array", bound=Any)


class DescribedTensors(Generic[_About]):
    """A file of tensors for a draft. They are read one by one.

    Args:
        file: what to read.
        what: it should be, for messages.
        key: of the description in the metadata.
        kind: dataclass of the description.
        framework: of the arrays that are read.
        remedy: what to do about a file that cannot be used.

    Attributes:
        source: the file, for messages.
        about: what it says of itself.
        remedy: as given.

    Raises:
        DraftConfigError: it is missing, truncated, foreign or of another format.
    """

    def __init__(
        self, file: str | Path, what: str, key: str, kind: type[_About], framework: Literal["np", "pt"], remedy: str
    ) -> None:
        self.source = str(file)
        self.remedy = remedy
        try:
            self._tensors = cast(Any, safe_open(self.source, framework=framework))
            self.about = parsed((self._tensors.metadata() or {}).get(key, ""), kind)
        # ValueError: it says nothing of itself, or something else.
        except (OSError, SafetensorError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DraftConfigError(f"{file} cannot be read as {what} ({reason}); {remedy}") from error

    @property
    def names(self) -> list[str]:
        """Of the tensors."""
        return list(self._tensors.keys())

    def read(self, name: str) -> Any:
        """Read a tensor.

        Raises:
            DraftConfigError: the file lacks it.
        """
        try:
            return self._tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise DraftConfigError(f"{self.source} lacks {name} ({error}); {self.remedy}") from error

    def read_like(self, name: str, like: _Array) -> _Array:
        """Read a tensor of the type and shape of another.

        Raises:
            DraftConfigError: the file lacks it, or has it with others.
        """
        found = self.read(name)
        if (found.dtype, found.shape) != (like.dtype, like.shape):
            raise DraftConfigError(
                f"{self.source} holds {name} as {found.dtype} {list(found.shape)} and not as {like.dtype} "
                f"{list(like.shape)}; {self.remedy}"
            )
        return cast(_Array, found)
