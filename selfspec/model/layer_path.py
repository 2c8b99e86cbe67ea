"""Layer paths: a pass runs all sublayers, those up to an exit, all but a skip set, or those after given states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from selfspec.architecture import Part as Part
from selfspec.cache.masks import Window
from selfspec.formats.format import Format


@dataclass(frozen=True, order=True)
class Sublayer:
    """Names one sublayer; sublayers compare in the order in which a pass runs them."""

    layer: int
    part: Part


@dataclass(frozen=True)
class LayerPath:
    """Says what a pass runs."""

    depth: int
    skipped: frozenset[Sublayer] = frozenset()  # left out; a layer without both passes its input through
    start: Sublayer | None = None  # where states of an earlier pass enter; nothing before it runs. None: from tokens
    format: Format | None = None  # of substitutes, or of the network itself; None: its own weights and dtype
    substituted: frozenset[Sublayer] = frozenset()
    head_substituted: bool = False
    window: Window | None = None  # that its tokens attend to; None: to all, as the target does

    @classmethod
    def full(cls, depth: int) -> LayerPath:
        """Return the target's own path: every sublayer, from tokens."""
        return cls(depth)

    @classmethod
    def without(cls, depth: int, skipped: Iterable[Sublayer]) -> LayerPath:
        """Return the path of all sublayers but a skip set, from tokens."""
        return cls(depth, frozenset(skipped))

    @classmethod
    def up_to(cls, depth: int, end: Sublayer) -> LayerPath:
        """Return the path up to `end`, from tokens. An early exit at layer E is `up_to(depth, attention of E)`."""
        return cls(depth, frozenset(sublayer for sublayer in sublayers(depth) if sublayer >= end))

    def resumed_at(self, start: Sublayer) -> LayerPath:
        """Return this path, entered at `start` with states that an earlier pass left there."""
        return replace(self, start=start)

    def runs(self, sublayer: Sublayer) -> bool:
        """Return whether the pass computes this sublayer."""
        return sublayer not in self.skipped and (self.start is None or sublayer >= self.start)

    @property
    def resume_point(self) -> Sublayer | None:
        """First sublayer that is left out or has substitutes: a full pass can resume there from this one's states.

        None: every sublayer is exact, or not even the first is.
        """
        if self.window is not None:
            return None
        first = min(self.skipped | self.substituted, default=None)
        return None if first == Sublayer(0, Part.ATTENTION) else first


def sublayers(depth: int) -> list[Sublayer]:
    """Return all sublayers of a network of `depth` layers, in the order in which a pass runs them."""
    return [Sublayer(layer, part) for layer in range(depth) for part in Part]
