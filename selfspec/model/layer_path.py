"""Which layers and sublayers a pass runs: all of them, up to an exit, all but a skip set, or from given states on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum


class Part(IntEnum):
    """The two sublayers of a decoder layer, in the order in which they run."""

    ATTENTION = 0
    MLP = 1


@dataclass(frozen=True, order=True)
class Sublayer:
    """One sublayer of the network; sublayers compare in the order in which a pass runs them."""

    layer: int
    part: Part


@dataclass(frozen=True)
class LayerPath:
    """What a pass runs.

    Attributes:
        depth: number of layers of the network.
        skipped: sublayers left out; a layer whose two sublayers are both left out passes its input through.
        start: where states computed earlier enter. Nothing before it runs. None: the pass starts from tokens.
    """

    depth: int
    skipped: frozenset[Sublayer] = frozenset()
    start: Sublayer | None = None

    @classmethod
    def full(cls, depth: int) -> LayerPath:
        """The target's own path: every sublayer, from tokens."""
        return cls(depth)

    @classmethod
    def without(cls, depth: int, skipped: Iterable[Sublayer]) -> LayerPath:
        """All sublayers but a skip set, from tokens."""
        return cls(depth, frozenset(skipped))

    @classmethod
    def up_to(cls, depth: int, end: Sublayer) -> LayerPath:
        """The sublayers before `end`, from tokens. An early exit at layer E is `up_to(depth, attention of E)`."""
        return cls(depth, frozenset(sublayer for sublayer in sublayers(depth) if sublayer >= end))

    def resumed_at(self, start: Sublayer) -> LayerPath:
        """The same path, entered at `start` with states that an earlier pass left there."""
        return replace(self, start=start)

    def runs(self, sublayer: Sublayer) -> bool:
        """Whether the pass computes this sublayer."""
        return sublayer not in self.skipped and (self.start is None or sublayer >= self.start)

    @property
    def resume_point(self) -> Sublayer | None:
        """Where a full pass can resume from this one's work: the first sublayer left out, all before it being exact.

        None where nothing is left out, and where nothing comes before what is.
        """
        first = min(self.skipped, default=None)
        return None if first == Sublayer(0, Part.ATTENTION) else first


def sublayers(depth: int) -> list[Sublayer]:
    """All sublayers of a network of `depth` layers, in the order in which a pass runs them."""
    return [Sublayer(layer, part) for layer in range(depth) for part in Part]
