"""Drafting with less of the weights: fewer experts, or fewer rows of the head (a reduced vocabulary)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.arguments import checked_path, shown
from selfspec.draft.along_layer_path import AroundLayerPath, LayerPathDrafter
from selfspec.draft.drafter import Drafter, drafter, read_number
from selfspec.errors import DraftConfigError
from selfspec.files.json_text import read_json
from selfspec.model.early_head import DraftHead
from selfspec.model.experts import experts_of
from selfspec.model.identity import weight_of
from selfspec.model.layer_path import LayerPath
from selfspec.model.tensor_parallel import check_on_one_process


class _WholeNetwork(LayerPathDrafter):
    """Runs all layers unchanged, as the base of another drafter."""

    def path(self, depth: int) -> LayerPath:
        return LayerPath.full(depth)


@drafter(
    "experts",
    argument=":N",
    example="experts:1",
    help="tokens of a mixture are sent to N experts; experts:1+int8 runs them in 8 bits",
)
@dataclass(frozen=True, eq=False)
class FewerExperts(AroundLayerPath):
    """Runs all layers, or another path drafter, with the `most` likeliest routed experts for each token.

    Shared experts always run. The model weights the chosen experts as if it were made with so few.
    """

    draft_with: LayerPathDrafter = field(default_factory=_WholeNetwork)
    most: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.most) is not int or self.most < 1:
            raise DraftConfigError(
                f"a token is sent to an integer number of experts, at least 1; got {shown(self.most)}"
            )

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> FewerExperts:
        return cls(most=read_number(argument))

    @property
    def spelling(self) -> str | None:
        if isinstance(self.draft_with, _WholeNetwork):
            return f"experts:{self.most}"
        before = self.draft_with.spelling
        return None if before is None else f"experts:{self.most}+{before}"

    def followed_by(self, behind: Drafter) -> Drafter | None:
        is_whole = isinstance(self.draft_with, _WholeNetwork)
        return replace(self, draft_with=behind) if is_whole and isinstance(behind, LayerPathDrafter) else None

    def path(self, depth: int) -> LayerPath:
        path = self.draft_with.path(depth)
        if path.experts is not None:
            raise DraftConfigError("a draft has one number of experts; write experts:N once")
        return replace(path, experts=self.most)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        super().check_model(model, adapter)
        active = max((each.active for each in experts_of(model, adapter)), default=0)
        if active <= self.most:
            said = (
                f"sends each token to {active} experts; take fewer, or another draft"
                if active
                else "has no routed experts that a draft can leave out; take another draft"
            )
            raise DraftConfigError(f"experts:{self.most}: {type(model).__name__} {said}")


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
