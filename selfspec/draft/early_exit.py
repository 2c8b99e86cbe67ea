"""Drafting by early exit: layers [0, E), then the model's own head, or one trained for this exit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.arguments import checked_path
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.drafter import Drafter, drafter, read_number
from selfspec.errors import DraftConfigError, ExitHeadError
from selfspec.files.json_text import Described, PositiveInt, read_described
from selfspec.model.early_head import DraftHead
from selfspec.model.identity import check_base
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.tensor_parallel import check_on_one_process


@drafter("exit", argument=":E", example="exit:4", help="early exit: the first E layers, then the head")
@dataclass(frozen=True)
class EarlyExit(LayerPathDrafter):
    """Drafts from an exit layer, as in LayerSkip (Elhoushi et al., 2024).

    Keys, values and states of layers [0, E) are exact, so verification resumes at layer E.

    Attributes:
        layer: the exit layer E, in 1..N-1 for a network of N layers.
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


FILE = "exit_head.safetensors"
ABOUT = "exits"
"""Key of the description in the file."""
_COPY = "copy the folder that selfspec train exit wrote again"


@dataclass(frozen=True)
class AboutExits:
    """Describes the heads of a file, one for each of `exits`, and the base that they were trained for."""

    format: Literal[3]
    exits: list[int]
    default: int
    hidden: PositiveInt
    rank: PositiveInt
    base: str


def trained_exits(folder: str | Path) -> Described[AboutExits]:
    """Read the exit heads of a folder; raise ExitHeadError for a file that is missing, damaged or of another format."""
    return read_described(checked_path("folder", folder, ExitHeadError) / FILE, ABOUT, AboutExits, ExitHeadError, _COPY)


class ExitAdapter(nn.Module):
    """Adds a norm and a gated MLP of width `rank` on a residual branch; untrained, it changes nothing.

    It reads one position at a time, so it has no keys and values, unlike Kangaroo's attention (Liu et al., 2024).
    """

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.gate = nn.Linear(hidden, rank, bias=False)
        self.up = nn.Linear(hidden, rank, bias=False)
        self.down = nn.Linear(rank, hidden, bias=False)
        self.scale = nn.Parameter(torch.ones(hidden))
        nn.init.zeros_(self.down.weight)

    def forward(self, states: Tensor) -> Tensor:
        """Adapt states, `[..., hidden]`."""
        normed = self.norm(states)
        adapted: Tensor = self.scale * states + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return adapted


@drafter(
    "head",
    argument=":FOLDER@E",
    example="head:FOLDER@4",
    help="a trained exit head, by `selfspec train exit`; without @E its best exit",
)
@dataclass(frozen=True, eq=False)
class ExitHead(LayerPathDrafter):
    """Drafts from an exit layer through a head trained for it; the base model is unchanged.

    The draft runs layers [0, E), an adapter, then the model's norm and head, and verification resumes at layer E.
    Related: Kangaroo (Liu et al., 2024), and exits that follow Draft & Verify.

    Attributes:
        layer: the exit layer E.
        draft_head: the adapter, and the tokens that can be drafted.
        base: fingerprint of the base's weights.
        source: the folder that it was read from, for messages.
    """

    layer: int
    draft_head: DraftHead
    base: str
    source: str = field(default="this exit head")

    @classmethod
    def from_pretrained(cls, folder: str | Path, layer: int | None = None) -> ExitHead:
        """Read an exit head from a folder of `selfspec train exit`; without `layer`, its best exit in training.

        Raises:
            ExitHeadError: the file is missing, truncated, corrupt, of another format, or lacks the exit.
        """
        held, source = trained_exits(folder), Path(folder) / FILE
        about, tensors, chosen = held.about, held.tensors, held.about.default if layer is None else layer
        if chosen not in about.exits:
            listed = ", ".join(map(str, about.exits))
            raise ExitHeadError(f"{folder} has no head for exit {chosen!r}; it has {listed}")
        prefix = f"exits.{chosen}."
        tokens = tensors.pop("tokens", None)
        if not all(weight.isfinite().all() for weight in tensors.values()):
            raise ExitHeadError(f"{source} holds NaN or infinite weights; train the exit head again")
        own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        if about.hidden * about.rank > sum(weight.numel() for weight in own.values()):
            raise ExitHeadError(f"the weights in {source} are fewer than its description says; {_COPY}")
        adapter = ExitAdapter(about.hidden, about.rank)
        try:
            adapter.load_state_dict(own)
        except RuntimeError as error:
            said = " ".join(str(error).split())
            raise ExitHeadError(f"the weights in {source} do not fit its description: {said}") from error
        adapter.to(next(iter(own.values())).dtype).requires_grad_(False).eval()
        head = DraftHead(adapter, None if tokens is None else tokens.long())
        return cls(chosen, head, about.base, str(folder))

    @property
    def head(self) -> DraftHead:
        return self.draft_head

    def path(self, depth: int) -> LayerPath:
        return EarlyExit(self.layer).path(depth)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        if self.draft_head.tokens is not None:
            check_on_one_process(model, f"the reduced vocabulary of {self.source}")
        remedy = "train exits for this one: selfspec train exit"
        check_base(model, self.base, self.source, ExitHeadError, remedy)

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> ExitHead:
        if not argument:
            raise ValueError(argument)
        folder, at, layer = argument.rpartition("@")
        if at and folder and layer.isascii() and layer.isdigit():
            return cls.from_pretrained(folder, read_number(layer))
        return cls.from_pretrained(argument)

    @property
    def spelling(self) -> str:
        return f"head:{self.source}@{self.layer}"

    def __repr__(self) -> str:
        return self.spelling
