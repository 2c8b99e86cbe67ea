"""Drafting with a skip set that was found for one model, read from a JSON file that names the model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.declaration import drafter
from selfspec.draft.layer_skip import LayerSkip
from selfspec.errors import DraftConfigError
from selfspec.files.json_text import read_json
from selfspec.files.writing import write_sealed
from selfspec.model.fingerprint import check_base
from selfspec.model.layer_path import LayerPath
from selfspec.values import checked_path


@dataclass(frozen=True)
class _Content:
    """Holds the fields of a skip file that drafting needs."""

    format: Literal[2]
    base: str
    attention: list[int] = field(default_factory=list)
    mlp: list[int] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)


@drafter("skip-file", argument=":FILE", help="the skip set that `selfspec search` found")
@dataclass(frozen=True)
class SkipFile(LayerPathDrafter):
    """Drafts with a `LayerSkip` for the one checkpoint whose fingerprint is `base`; named by the file it came from."""

    skip: LayerSkip
    base: str
    source: str = field(compare=False)

    @classmethod
    def from_file(cls, file: str | Path) -> SkipFile:
        """Read a skip file that `selfspec search` wrote.

        Raises:
            DraftConfigError: the file is missing, unreadable, or no skip file.
        """
        remedy = "give a skip set that selfspec search wrote, or write the set itself, as in skip:attn=3,5;mlp=4"
        found = read_json(checked_path("file", file, DraftConfigError), _Content, DraftConfigError, remedy)
        return cls(LayerSkip(found.attention, found.mlp, found.layers), found.base, str(file))

    def path(self, depth: int) -> LayerPath:
        return self.skip.path(depth)

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> SkipFile:
        if not argument:
            raise ValueError(argument)
        return cls.from_file(argument)

    @property
    def spelling(self) -> str:
        return f"skip-file:{self.source}"

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        check_base(model, self.base, self.source, DraftConfigError, "search again: selfspec search")
        self.skip.check_model(model, adapter)


def write_skip_file(skip: LayerSkip, base: str, file: Path, about: Mapping[str, Any]) -> None:
    """Write a skip set, the fingerprint of the weights it is for, and further facts about it.

    Raises:
        StorageError: the file cannot be written.
    """
    found = _Content(2, base, list(skip.attention), list(skip.mlp), list(skip.layers))
    write_sealed(file, {**asdict(found), **about})
