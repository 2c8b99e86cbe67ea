"""Drafting over keys and values in fewer bits: a draft step reads copies of them, the target reads them exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from transformers import PreTrainedModel

from selfspec.cache.rounded_copy import CacheBits, copied_bytes
from selfspec.draft.along_layer_path import LayerPathDrafter, OverLessOfCache
from selfspec.draft.declaration import drafter
from selfspec.draft.drafter import Drafter, OwnBytes
from selfspec.errors import DraftConfigError
from selfspec.model.layer_path import LayerPath
from selfspec.model.summary import cache_summary
from selfspec.values import shown


@drafter(
    "kv4",
    written="behind",
    example="int8+kv4",
    help="any of these whose steps read keys and values in 4 bits, for long texts",
)
@drafter(
    "kv8",
    written="behind",
    example="int8+kv8",
    help="any of these whose steps read keys and values in 8 bits, for long texts",
)
@dataclass(frozen=True, eq=False)
class CacheInBits(OverLessOfCache):
    """Another path drafter, whose draft steps read the keys and values of committed tokens in `cache_bits` bits.

    They lie beside the exact ones, which the target reads, and take an eighth of their bytes in 4 bits of float32.
    QuantSpec (Tiwari et al., 2025, arXiv 2502.10424) drafts so.
    """

    needs_masks = "reads its cache in another order, so that a draft cannot read copies of it"

    cache_bits: CacheBits = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.cache_bits) is not int or self.cache_bits not in get_args(CacheBits):
            raise DraftConfigError(f"keys and values are copied in 8 or 4 bits, got {shown(self.cache_bits)}")

    @classmethod
    def spelled_behind(cls, before: Drafter, name: str, argument: str | None) -> CacheInBits:
        if argument is not None or not isinstance(before, LayerPathDrafter):
            raise ValueError(argument)
        return cls(before, 8 if name == "kv8" else 4)

    @property
    def spelling(self) -> str | None:
        before = self.draft_with.spelling
        return None if before is None else f"{before}+kv{self.cache_bits}"

    def path(self, depth: int) -> LayerPath:
        path = self.draft_with.path(depth)
        if path.view.bits is not None:
            raise DraftConfigError("a draft reads one copy of keys and values; write +kv4 or +kv8 once")
        return replace(path, view=replace(path.view, bits=self.cache_bits))

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        cache = cache_summary(model.config.get_text_config(decoder=True), model.dtype)
        copied = copied_bytes(cache.bytes_per_token // model.dtype.itemsize, cache.head_dim, self.cache_bits)
        return super().own_bytes(model) + OwnBytes(copies=copied)
