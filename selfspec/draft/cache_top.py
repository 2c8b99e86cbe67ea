"""Drafting over the keys that the target attended to most: a draft step attends to some of the text, not to all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.masks import all_layers_slide
from selfspec.cache.top_slots import CHUNK
from selfspec.cache.view import CacheView
from selfspec.draft.along_layer_path import OverPartOfCache
from selfspec.draft.declaration import drafter
from selfspec.errors import DraftConfigError
from selfspec.model.registry import has_encoder
from selfspec.runtime.attention_shares import AttentionShares
from selfspec.values import shown

LEAST = 4 * CHUNK
"""The fewest keys."""


@drafter(
    "top",
    argument=":N",
    written="behind",
    example="int8+top:512",
    help="any of these whose steps attend to the N tokens that the target attends to most, for long texts",
)
@dataclass(frozen=True, eq=False)
class TopOfCache(OverPartOfCache):
    """Another path drafter, whose draft steps attend to `keys` tokens: a quarter of them the latest of the text.

    The others are the passages that the target's attention to was largest, all its layers and heads together, which is
    asked every 64 tokens by a plain step that keeps its attention. Layers with a sliding window attend to that.
    SpecExtend (Cha et al., 2025, arXiv 2505.20776) and SparseSpec (2025, arXiv 2512.01278) draft this way.
    """

    needs_masks = "makes its masks itself, so that a draft cannot attend to some of its keys"

    keys: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.keys) is not int or self.keys < LEAST:
            raise DraftConfigError(
                f"a draft attends to at least {LEAST} keys, got {shown(self.keys)}; e.g. int8+top:512"
            )

    @property
    def spelling(self) -> str | None:
        before = self.draft_with.spelling
        return None if before is None else f"{before}+top:{self.keys}"

    def part(self, view: CacheView) -> CacheView:
        return replace(view, top_keys=self.keys)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        super().check_model(model, adapter)
        alone = f"draft with {self.draft_with.spelling or 'the same drafter'} alone"
        if has_encoder(model) or not AttentionShares(model).sees_any:
            raise DraftConfigError(f"what {type(model).__name__} attends to cannot be seen; {alone}")
        if all_layers_slide(model.config.get_text_config(decoder=True)):
            raise DraftConfigError(f"every layer of {type(model).__name__} attends to a window already; {alone}")
