"""Drafting over a window of the cache: a draft step attends to the latest tokens and the first few, not to all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from selfspec.cache.view import CacheView, Window
from selfspec.draft.along_layer_path import OverPartOfCache
from selfspec.draft.declaration import drafter
from selfspec.errors import DraftConfigError
from selfspec.values import shown

SINKS = 4
"""First tokens that stay in sight, as StreamingLLM has them."""
# No text is longer.
_MOST = 10**9 - 1


@drafter(
    "window",
    argument=":N",
    written="behind",
    example="int8+window:512",
    help="any of these whose steps attend to the latest N tokens and the first 4, for long texts",
)
@dataclass(frozen=True, eq=False)
class CacheWindow(OverPartOfCache):
    """Another path drafter, whose draft steps attend to the `recent` latest tokens and to the first few, the `sinks`.

    At long contexts a step reads more of the cache than of the weights; this bounds what a draft step reads. The target
    attends to all. StreamingLLM (Xiao et al., 2024, arXiv 2309.17453) found the sinks, MagicDec (Sadhukhan et al.,
    2024, arXiv 2408.11049) drafts this way.
    """

    needs_masks = "makes its masks itself, so that a draft cannot attend to a window"

    recent: int = 512
    sinks: int = SINKS

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, least in (("recent", self.recent, 1), ("sinks", self.sinks, 0)):
            if type(value) is not int or not least <= value <= _MOST:
                raise DraftConfigError(
                    f"a window's {name} is an integer from {least} to {_MOST}, got {shown(value)}; e.g. int8+window:512"
                )

    @property
    def spelling(self) -> str | None:
        before = self.draft_with.spelling
        return None if self.sinks != SINKS or before is None else f"{before}+window:{self.recent}"

    def part(self, view: CacheView) -> CacheView:
        return replace(view, window=Window(self.recent, self.sinks))
