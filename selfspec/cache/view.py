"""What a pass attends to of the cache: all of it, or a part, or copies in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.cache.rounded_copy import CacheBits


@dataclass(frozen=True)
class Window:
    """The latest positions of a text, and the first ones.

    A window of the latest tokens loses the text; with the first few it does not (StreamingLLM; Xiao et al., 2024, arXiv
    2309.17453).

    Attributes:
        recent: the latest positions, the token's own included.
        sinks: the first positions.
    """

    recent: int
    sinks: int


@dataclass(frozen=True)
class CacheView:
    """What the tokens of a pass attend to. The target always attends to all of the exact cache.

    Attributes:
        window: the part of the text; None: all.
        top_keys: how many tokens, those that the target attended to most; None: all.
        bits: of the copies of committed keys and values that are read; None: the exact ones are.
    """

    window: Window | None = None
    top_keys: int | None = None
    bits: CacheBits | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the exact cache."""
        return self == WHOLE


WHOLE = CacheView()
