"""Views of the cache: a pass attends to all of it, or to a part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Limits attention to the latest positions of a text, the token's own included, and the first ones, the sinks.

    Without the first few a model fails (StreamingLLM; Xiao et al., 2024, arXiv 2309.17453).
    """

    recent: int
    sinks: int


@dataclass(frozen=True)
class CacheView:
    """Says what the tokens of a pass attend to: all, or a window. The target always attends to all of the cache."""

    window: Window | None = None


WHOLE = CacheView()
"""All of the cache."""
