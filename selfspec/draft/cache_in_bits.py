"""Drafting over keys and values in fewer bits: a draft step reads copies of them, the target reads them exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.rounded_copy import CacheBits, copied_bytes
from selfspec.draft.along_layer_path import LONG, AroundLayerPath, LayerPathDrafter, LayerPathProposer
from selfspec.draft.declaration import drafter
from selfspec.draft.drafter import Drafter, OwnBytes
from selfspec.draft.rows_view import RowsView
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
class CacheInBits(AroundLayerPath):
    """Another path drafter, whose draft steps read the keys and values of committed tokens in `cache_bits` bits.

    They lie beside the exact ones, which the target reads, and take an eighth of their bytes in 4 bits of float32.
    QuantSpec (Tiwari et al., 2025, arXiv 2502.10424) drafts so.
    """

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

    @property
    def runs_exact_layers(self) -> bool:
        return False

    @classmethod
    def variants_behind(cls, before: Drafter, context: int) -> Sequence[Drafter]:
        return [cls(before)] if isinstance(before, LayerPathDrafter) and context >= LONG else ()

    def path(self, depth: int) -> LayerPath:
        path = self.draft_with.path(depth)
        if path.cache_bits is not None:
            raise DraftConfigError("a draft reads one copy of keys and values; write +kv4 or +kv8 once")
        return replace(path, cache_bits=self.cache_bits)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        super().check_model(model, adapter)
        if adapter.ragged != "mask":
            raise DraftConfigError(
                f"{type(model).__name__} reads its cache in another order, so that a draft cannot read copies of it; "
                f"draft with {self.draft_with.spelling or 'the same drafter'} alone"
            )

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        cache = cache_summary(model.config.get_text_config(decoder=True), model.dtype)
        copied = copied_bytes(cache.bytes_per_token // model.dtype.itemsize, cache.head_dim, self.cache_bits)
        return self.draft_with.own_bytes(model) + OwnBytes(copies=copied)

    def begin(self, rows: RowsView) -> LayerPathProposer:
        rows.runner.cache.check_copies()
        return super().begin(rows)
