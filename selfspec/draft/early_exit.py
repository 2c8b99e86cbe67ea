"""Drafting by leaving the network early: layers [0, E), then the model's own norm and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.declaration import drafter, read_number
from selfspec.draft.drafter import Drafter
from selfspec.errors import DraftConfigError
from selfspec.model.layer_path import LayerPath, Part, Sublayer


@drafter("exit", argument=":E", example="exit:4", help="early exit: the first E layers, then the head")
@dataclass(frozen=True)
class EarlyExit(LayerPathDrafter):
    """Drafts from an exit layer, as in LayerSkip (Elhoushi et al., 2024).

    Keys, values and exit states of layers [0, E) are exact, so verification resumes at layer E.

    Attributes:
        layer: the exit layer E, in 1..N-1 for a network of N layers: the draft runs layers [0, E).
    """

    layer: int

    def path(self, depth: int) -> LayerPath:
        if type(self.layer) is not int:
            raise DraftConfigError(f"exit layer must be an integer, got {self.layer!r}; write e.g. EarlyExit(layer=4)")
        if not 1 <= self.layer <= depth - 1:
            raise DraftConfigError(
                f"exit layer {self.layer} is out of range: this model has {depth} layers, "
                + (f"choose 1..{depth - 1}" if depth > 1 else "too few to leave early")
            )
        return LayerPath.up_to(depth, Sublayer(self.layer, Part.ATTENTION))

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> EarlyExit:
        return cls(read_number(argument))

    @property
    def spelling(self) -> str:
        return f"exit:{self.layer}"

    @classmethod
    def variants(cls, depth: int) -> Sequence[Drafter]:
        return [cls(layer) for layer in range(1, depth)]
