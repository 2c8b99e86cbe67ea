"""Drafting with a skip set: layers or sublayers left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.arguments import checked_path
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.drafter import drafter, read_number
from selfspec.errors import DraftConfigError
from selfspec.files.json_text import read_json
from selfspec.files.writing import write_sealed
from selfspec.model.identity import check_base
from selfspec.model.layer_path import LayerPath, Part, Sublayer, sublayers

MOST_LAYERS = 10_000
"""More layers than any model has; a larger number is a mistake."""


_NAMES = {"attn": "attention", "mlp": "mlp", "layers": "layers"}
_PARTS = {"attention": (Part.ATTENTION,), "mlp": (Part.MLP,), "layers": tuple(Part)}
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


@drafter(
    "skip",
    argument=":PART=LAYERS",
    example="skip:attn=3,5;mlp=4;layers=7-9",
    help="all but some attention (attn), MLPs (mlp) and whole layers",
)
@drafter("skip-file", argument=":FILE", help="the skip set that `selfspec search` found")
@dataclass(frozen=True, init=False)
class LayerSkip(LayerPathDrafter):
    """Drafts with a skip set, as in Draft & Verify (Zhang et al., 2023) and SWIFT (Xia et al., 2024).

    Everything before the first skipped sublayer is exact, so verification resumes there. `attention`, `mlp` and
    `layers` list the layers whose attention, MLP or whole is skipped. Read from a file, `source`, the set is for one
    checkpoint alone, the one with fingerprint `base`.
    """

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    layers: tuple[int, ...]
    base: str | None = None
    source: str | None = field(default=None, compare=False)

    def __init__(self, attention: Iterable[int] = (), mlp: Iterable[int] = (), layers: Iterable[int] = ()) -> None:
        for name, numbers in (("attention", attention), ("mlp", mlp), ("layers", layers)):
            object.__setattr__(self, name, layer_numbers(name, numbers))

    @classmethod
    def from_file(cls, file: str | Path) -> LayerSkip:
        """Read a skip file that `selfspec search` wrote.

        Raises:
            DraftConfigError: the file is missing, unreadable, or no skip file.
        """
        remedy = "give a skip set that selfspec search wrote, or write the set itself, as in skip:attn=3,5;mlp=4"
        held = read_json(checked_path("file", file, DraftConfigError), _Content, DraftConfigError, remedy)
        found = cls(held.attention, held.mlp, held.layers)
        object.__setattr__(found, "base", held.base)
        object.__setattr__(found, "source", str(file))
        return found

    def path(self, depth: int) -> LayerPath:
        skipped: set[Sublayer] = set()
        for name, parts in _PARTS.items():
            numbers: tuple[int, ...] = getattr(self, name)
            for layer in numbers:
                if not 0 <= layer < depth:
                    raise DraftConfigError(
                        f"{name}={list(numbers)}: layer {layer} is out of range; this model has layers 0..{depth - 1}"
                    )
                twice = skipped & {Sublayer(layer, part) for part in parts}
                if twice:
                    raise DraftConfigError(
                        f"{name}={list(numbers)}: layer {layer} is skipped more than once; name each sublayer once"
                    )
                skipped |= {Sublayer(layer, part) for part in parts}
        if not skipped:
            raise DraftConfigError(
                "the skip set is empty; name at least one layer, or pass draft=None for plain decoding"
            )
        if len(skipped) == len(sublayers(depth)):
            raise DraftConfigError("the skip set leaves nothing of the network to draft with; skip fewer layers")
        return LayerPath.without(depth, skipped)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        if self.base is not None and self.source is not None:
            check_base(model, self.base, self.source, DraftConfigError, "search again: selfspec search")
        layers = adapter.decoder_layers(model)
        lacking = [layer for layer in self.mlp if not adapter.modules_of(layers[layer], Part.MLP)]
        if lacking:
            raise DraftConfigError(
                f"mlp={lacking}: these layers of {type(model).__name__} have no MLP that could be skipped; skip "
                "attention or whole layers"
            )

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> LayerSkip:
        if not argument:
            raise ValueError(argument)
        if name == "skip-file":
            return cls.from_file(argument)
        skipped: dict[str, list[int]] = {kind: [] for kind in _PARTS}
        for part in argument.split(";"):
            kind, _, ranges = part.strip().partition("=")
            if kind not in _NAMES or skipped[_NAMES[kind]]:
                raise ValueError(argument)
            for numbers in ranges.split(","):
                skipped[_NAMES[kind]] += _range(numbers.strip())
        return cls(**skipped)

    @property
    def spelling(self) -> str:
        if self.source is not None:
            return f"skip-file:{self.source}"
        parts = ((name, getattr(self, part)) for name, part in _NAMES.items())
        return "skip:" + ";".join(f"{name}={','.join(map(str, layers))}" for name, layers in parts if layers)


def _range(numbers: str) -> range:
    found = _RANGE.fullmatch(numbers)
    if found is None:
        raise ValueError(numbers)
    first, last = read_number(found[1]), read_number(found[2] or found[1])
    if last < first or last >= MOST_LAYERS:
        raise ValueError(numbers)
    return range(first, last + 1)


def layer_numbers(name: str, numbers: Iterable[int]) -> tuple[int, ...]:
    """Return the layer numbers given for the argument `name`; refuse anything but a list of different integers."""
    if isinstance(numbers, str | bytes) or not isinstance(numbers, Iterable):
        raise DraftConfigError(f"{name} must be a list of layer numbers, got {numbers!r}")
    listed = tuple(islice(numbers, MOST_LAYERS + 1))
    if len(listed) > MOST_LAYERS:
        raise DraftConfigError(f"{name} lists more than {MOST_LAYERS} layers, which no model has")
    for number in listed:
        if type(number) is not int:
            raise DraftConfigError(
                f"{name}={list(listed)!r}: {number!r} is not an integer layer number; give a list of layer numbers"
            )
    if len(set(listed)) < len(listed):
        raise DraftConfigError(f"{name}={list(listed)!r} lists a layer more than once; name each once")
    return listed


@dataclass(frozen=True)
class _Content:
    format: Literal[2]
    base: str
    attention: list[int] = field(default_factory=list)
    mlp: list[int] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)


def write_skip_file(skip: LayerSkip, base: str, file: Path, about: Mapping[str, Any]) -> None:
    """Write a skip set, the fingerprint of its weights, and further facts about it."""
    found = _Content(2, base, list(skip.attention), list(skip.mlp), list(skip.layers))
    write_sealed(file, {**asdict(found), **about})
