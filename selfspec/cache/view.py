"""Views of the cache: a pass attends to all of it, to a part, or to copies in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.cache.rounded_copy import CacheBits


@dataclass(frozen=True)
class Window:
    """Limits attention to the latest positions of a text and the first ones.

    With the latest tokens alone a model fails; with the first few added it does not (StreamingLLM; Xiao et al., 2024,
    arXiv 2309.17453).

    Attributes:
        recent: number of latest positions, the token's own included.
        sinks: number of first positions.
    """

    recent: int
    sinks: int


@dataclass(frozen=True)
class CacheView:
    """Says what the tokens of a pass attend to. The target always attends to all of the exact cache.

    Attributes:
        window: the part of the text; None: all.
        top_keys: number of tokens, those that the target attended to most; None: all.
        bits: of the copies of committed keys and values that are read; None: the exact ones are read.
    """

    window: Window | None = None
    top_keys: int | None = None
    bits: CacheBits | None = None

    @property
    def is_whole(self) -> bool:
        """True if it is all of the exact cache."""
        return self == WHOLE


WHOLE = CacheView()
