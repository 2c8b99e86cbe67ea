"""Drafting with fewer rows of the head: a reduced vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.arguments import checked_path, shown
from selfspec.draft.along_layer_path import AroundLayerPath, LayerPathDrafter
from selfspec.draft.drafter import Drafter, drafter
from selfspec.errors import DraftConfigError
from selfspec.files.json_text import read_json
from selfspec.model.early_head import DraftHead
from selfspec.model.identity import weight_of
from selfspec.model.tensor_parallel import check_on_one_process


@drafter(
    "vocab",
    argument=":FILE",
    written="behind",
    example="exit:4+vocab:FILE",
    help="any of these with fewer rows of the head, by `selfspec train vocabulary`",
)
@dataclass(frozen=True, eq=False)
class ReducedVocabulary(AroundLayerPath):
    """Runs another path drafter, whose draft steps read only the head's rows for some distinct tokens.

    It is exact under every lossless rule, because q is 0 at all other tokens: the target may still choose them, and the
    draft ends there. FR-Spec (Zhao et al., 2025) does this for draft models.
    """

    tokens: tuple[int, ...]
    source: str | None = None
    _head: DraftHead = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = self.tokens if isinstance(self.tokens, list | tuple | range) else ()
        whole = all(type(token) is int and 0 <= token < 2**63 for token in listed)
        if not listed or not whole or len(set(listed)) != len(listed):
            raise DraftConfigError(
                f"a reduced vocabulary must list token ids, at least one and none twice; got {shown(self.tokens)}"
            )
        object.__setattr__(self, "tokens", tuple(listed))
        tokens = torch.tensor(self.tokens)
        object.__setattr__(self, "_head", replace(self.draft_with.head or DraftHead(), tokens=tokens))

    @classmethod
    def from_file(cls, draft_with: LayerPathDrafter, file: str | Path) -> ReducedVocabulary:
        """Read the tokens from a file of `selfspec train vocabulary`: JSON with a list under `tokens`.

        Raises:
            DraftConfigError: the file cannot be read or lists no tokens.
        """
        remedy = "write a vocabulary with selfspec train vocabulary: it lists token ids under tokens"
        place = checked_path("file", file, DraftConfigError)
        return cls(draft_with, read_json(place, _Vocabulary, DraftConfigError, remedy).tokens, str(file))

    @classmethod
    def spelled_behind(cls, before: Drafter, name: str, argument: str | None) -> ReducedVocabulary:
        if not argument or not isinstance(before, LayerPathDrafter) or isinstance(before, ReducedVocabulary):
            raise ValueError(argument)
        return cls.from_file(before, argument)

    @property
    def spelling(self) -> str | None:
        before = self.draft_with.spelling
        return None if self.source is None or before is None else f"{before}+vocab:{self.source}"

    @property
    def head(self) -> DraftHead:
        return self._head

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        super().check_model(model, adapter)
        head = weight_of(model.get_output_embeddings())
        if head.is_meta:
            raise DraftConfigError(
                "a reduced vocabulary reads rows of a head that is not in memory; draft with the whole vocabulary"
            )
        check_on_one_process(model, "a reduced vocabulary, which reads rows of the head,")
        rows = head.shape[0]
        if max(self.tokens) >= rows:
            raise DraftConfigError(
                f"the reduced vocabulary names token {max(self.tokens)}, but this model has {rows}; count one on its "
                "own tokenizer: selfspec train vocabulary"
            )


@dataclass(frozen=True)
class _Vocabulary:
    tokens: tuple[int, ...]
