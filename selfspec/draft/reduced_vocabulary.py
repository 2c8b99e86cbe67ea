"""Drafting from a reduced vocabulary: a draft step reads only some rows of the head; q is 0 at all other tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import DraftConfigError
from selfspec.files.json_text import parse_json
from selfspec.model.early_head import DraftHead
from selfspec.model.layer_path import LayerPath

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfspec.model.adapter import Adapter


@dataclass(frozen=True, eq=False)
class ReducedVocabulary(LayerPathDrafter):
    """Another path drafter, whose draft steps read only the rows of the head that belong to some tokens.

    Exact under every lossless rule, because q is 0 at the other tokens: the target may still choose them, and then
    the draft ends there. FR-Spec (Zhao et al., 2025) does this for draft models.

    Attributes:
        draft_with: drafts along a path of the model.
        tokens: ids that can be drafted, distinct.
        source: the file they were read from, for messages.
    """

    draft_with: LayerPathDrafter
    tokens: tuple[int, ...]
    source: str | None = None
    _head: DraftHead = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.draft_with, LayerPathDrafter):
            raise DraftConfigError(f"a reduced vocabulary needs a drafter along a path, got {self.draft_with!r}")
        whole = all(type(token) is int and 0 <= token < 2**63 for token in self.tokens)
        if not self.tokens or not whole or len(set(self.tokens)) != len(self.tokens):
            raise DraftConfigError("a reduced vocabulary must list token ids, at least one and none twice")
        tokens = torch.tensor(self.tokens)
        object.__setattr__(self, "_head", replace(self.draft_with.head or DraftHead(), tokens=tokens))

    @classmethod
    def from_file(cls, draft_with: LayerPathDrafter, file: str | Path) -> ReducedVocabulary:
        """With the tokens of a file that `selfspec train vocabulary` wrote: JSON with a list under `tokens`.

        Raises:
            DraftConfigError: the file cannot be read or lists no tokens.
        """
        return cls(draft_with, read_vocabulary(file), str(file))

    @property
    def head(self) -> DraftHead:
        return self._head

    def path(self, depth: int) -> LayerPath:
        return self.draft_with.path(depth)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        self.draft_with.check_model(model, adapter)
        rows = model.get_output_embeddings().weight.shape[0]
        if max(self.tokens) >= rows:
            raise DraftConfigError(
                f"the reduced vocabulary names token {max(self.tokens)}, but this model has {rows}; count one on its "
                "own tokenizer: selfspec train vocabulary"
            )


def read_vocabulary(file: str | Path) -> tuple[int, ...]:
    """The token ids of a file that `selfspec train vocabulary` wrote.

    Raises:
        DraftConfigError: the file cannot be read or lists no tokens.
    """
    try:
        content = parse_json(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DraftConfigError(f"the vocabulary {file} cannot be read ({error})") from error
    tokens = content.get("tokens") if isinstance(content, dict) else None
    if not isinstance(tokens, list):
        raise DraftConfigError(
            f'the vocabulary {file} has no list under "tokens"; write one: selfspec train vocabulary'
        )
    return tuple(tokens)
