"""What an arm is: one way to decode, named, so that it can be made again in another process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor

from selfspec.measure.timing import Call
from selfspec.runtime.named import RuntimeName
from selfspec.tools.bench.cell import Cell

LOOK_UP_TOKENS = 10
"""Tokens that `model.generate` looks up at a time, as its documentation has it."""


_SUFFIXES = {
    RuntimeName.TRACED: "",
    RuntimeName.EAGER: ", stock modules",
    RuntimeName.COMPILED: ", compiled",
    RuntimeName.GRAPHS: ", CUDA graphs",
}


class ArmKind(StrEnum):
    """The kinds of arms."""

    GENERATE = "generate"
    STATIC = "static"
    LOOK_UP = "lookup"
    EARLY_EXIT = "early-exit"
    PLAIN = "plain"
    DRAFT = "draft"


@dataclass(frozen=True)
class ArmSpec:
    """Which arm.

    Attributes:
        kind: of the arm.
        draft: of selfspec's drafting arms, by name.
        exit_layer: of `model.generate` with an early exit.
        length: tokens drafted each round; None: as the arm itself decides.
        accept: acceptance rule, by name; None: selfspec's default.
        packed: whether it runs a model whose weights are packed.
        runtime: how selfspec runs its passes.
    """

    kind: ArmKind
    draft: str | None = None
    exit_layer: int | None = None
    length: int | None = None
    accept: str | None = None
    packed: bool = False
    runtime: RuntimeName = RuntimeName.TRACED

    @property
    def name(self) -> str:
        """What reports call it."""
        length = "" if self.length is None else f", length {self.length}"
        rule = "" if self.accept is None else f", {self.accept}"
        how = (", packed" if self.packed else "") + _SUFFIXES[self.runtime]
        match self.kind:
            case ArmKind.GENERATE:
                return "model.generate"
            case ArmKind.STATIC:
                return "model.generate, static cache, compiled"
            case ArmKind.LOOK_UP:
                return "model.generate, prompt look-up"
            case ArmKind.EARLY_EXIT:
                return f"model.generate, assistant_early_exit={self.exit_layer}{length}"
            case ArmKind.PLAIN:
                return f"selfspec plain{how}"
            case ArmKind.DRAFT:
                return f"selfspec {self.draft}{length}{rule}{how}"

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> ArmSpec:
        """Read back from JSON."""
        runtime = RuntimeName(found.get("runtime", RuntimeName.TRACED))
        return cls(**{**found, "kind": ArmKind(found["kind"]), "runtime": runtime})


class Arm(ABC):
    """One way to decode with one model.

    Attributes:
        spec: which.
    """

    def __init__(self, spec: ArmSpec) -> None:
        self.spec = spec

    def absence(self, cell: Cell) -> str | None:
        """Why it cannot run in a cell; None where it can."""
        return None

    @abstractmethod
    def decode(self, prompts: Tensor, cell: Cell, seed: int) -> Call:
        """Decode once.

        Args:
            prompts: `[batch, prompt]`, without padding.
            cell: says how.
            seed: of what is drawn.
        """
