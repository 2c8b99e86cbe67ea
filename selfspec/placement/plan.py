"""Plan for a byte budget what of each layer stays in memory, what is streamed, and in which format layers draft."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import fmean

from selfspec.arguments import shown
from selfspec.errors import UnsupportedOptionError
from selfspec.formats.format import formats

_UNITS = {unit: 1024**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))} | {
    unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), 1)
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", re.ASCII)


def parse_bytes(name: str, size: str | int) -> int:
    """Return a size in bytes: "6GiB", "500 MB" or a number of bytes."""
    if type(size) is int and size > 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = None if match is None else {each.lower(): each for each in _UNITS}.get(match[2].lower())
    if match is None or unit is None or not 1 <= float(match[1]) * _UNITS[unit] < math.inf:
        raise UnsupportedOptionError(f"{name}={shown(size)} is no size; write a number and a unit, such as '6GiB'")
    return int(float(match[1]) * _UNITS[unit])


def shown_bytes(size: float) -> str:
    """Write a size for people: "1.50 GiB"."""
    for unit in ("TiB", "GiB", "MiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.2f} {unit}"
    return f"{size / _UNITS['KiB']:.1f} KiB"


SLOTS = 4
"""Streamed weights in memory at once: two of experts, and two being fetched."""
LONGEST = 32
"""The most tokens drafted each round in a chain, or levels of a tree."""
NODES = 63
"""The most nodes of a tree: with the token before them they are rows that kernels for few rows take at once."""
# Operations that the host launches for a layer run by its module, and for a draft step beside a captured pass: by count
# on a Llama.
_OF_LAYER, _OF_STEP = 47, 60


class Stays(Enum):
    """Says what of the weights of a layer is in memory; the rest is fetched by each pass."""

    WHOLE = "the layer"
    PART = "a part that drafts"
    NOTHING = "a copy that drafts, if anything"


@dataclass(frozen=True)
class Memory:
    """Counts the bytes of memory that a model takes.

    Attributes:
        process: in use before the model is loaded; 0 where the budget limits a device.
        kept: weights that always stay: embeddings, norms, and all that cannot be streamed.
        layers: streamable weights of each layer; the head, if it can be streamed, is the last layer.
        substitutes: copies of each layer, by format.
        parts: the part of each layer that drafts by itself while the rest is fetched, by the format that reads it.
        draft: a drafter's own weights, and its keys and values of the context.
        kept_substitutes: substitutes of weights that always stay, by format; made only if all layers stay.
    """

    process: int
    kept: int
    layers: tuple[int, ...]
    largest: int
    substitutes: dict[str, tuple[int, ...]]
    cache: int
    working: int
    draft: int = 0
    kept_substitutes: dict[str, int] = field(default_factory=dict)
    parts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def whole(self, format: str | None) -> Split:
        """Count the bytes of the whole model, with copies in the format of a draft."""
        return Split(self, len(self.layers), format)

    @property
    def least(self) -> int:
        """Bytes that every plan takes."""
        return self.process + self.kept + self.cache + self.working + self.draft


@dataclass(frozen=True)
class Bandwidth:
    """Gives the bytes a second at which weights are read from memory, and streamed.

    Attributes:
        launch: seconds in which the host launches an operation of a module; 0 where it computes itself.
    """

    memory: float
    stream: float
    launch: float = 0.0


@dataclass(frozen=True)
class Split:
    """Says what of a model stays in memory, and counts its bytes; the rest is streamed.

    Attributes:
        resident: number of layers that stay, from the first; the head counts as the layer after the last.
        format: of copies of the layers of which nothing stays, or of the part of all; None: there are no drafts.
        partly: number of layers, after those that stay, of which a part stays that drafts.
        part: the format that reads it; None: there are no such layers.
    """

    memory: Memory
    resident: int
    format: str | None
    partly: int = 0
    part: str | None = None

    def stays(self, layer: int) -> Stays:
        """Return which parts of a layer are in memory."""
        if layer < self.resident:
            return Stays.WHOLE
        return Stays.PART if layer < self.end else Stays.NOTHING

    def drafts(self, stays: Stays) -> str | None:
        """Return the format in which layers draft of which not all stays; None: nothing drafts."""
        return self.part if stays is Stays.PART else self.format

    @property
    def end(self) -> int:
        return self.resident + self.partly

    @property
    def whole(self) -> int:
        return sum(self.memory.layers[: self.resident])

    @property
    def parts(self) -> int:
        return 0 if self.part is None else sum(self.memory.parts[self.part][self.resident : self.end])

    @property
    def streamed(self) -> int:
        """Bytes that a target pass streams."""
        return sum(self.memory.layers) - self.whole - self.parts

    @property
    def copies(self) -> int:
        """Copies of layers of which nothing stays; where all stay, those that a draft needs."""
        if self.format is None or self.format in self.memory.parts:
            return 0
        substitutes = self.memory.substitutes[self.format]
        if self.resident == len(self.memory.layers):
            return sum(substitutes) + self.memory.kept_substitutes.get(self.format, 0)
        return sum(substitutes[self.end :])

    @property
    def account(self) -> dict[str, int]:
        """Bytes by what they are for; every plan, refusal and summary counts these, and no others."""
        memory = self.memory
        return {
            "for the process": memory.process,
            "for weights that stay": memory.kept + self.whole,
            "for weights on their way": 0 if self.resident == len(memory.layers) else SLOTS * memory.largest,
            "for parts that draft": self.parts,
            "for copies that draft": self.copies,
            "for keys and values": memory.cache,
            "for the draft's own weights, keys and values": memory.draft,
            "to work with": memory.working,
        }

    @property
    def told(self) -> str:
        """The account in words."""
        return ", ".join(f"{shown_bytes(size)} {what}" for what, size in self.account.items() if size)

    @property
    def total(self) -> int:
        return sum(self.account.values())


@dataclass(frozen=True, kw_only=True)
class Plan(Split):
    """Adds what is predicted of it.

    Attributes:
        plain: steps of plain decoding a second.
        drafting: tokens a second with drafts; None: there are no drafts.
        draft_step: c; None: there are no drafts.
    """

    bandwidth: Bandwidth
    plain: float
    drafting: float | None = None
    draft_step: float | None = None
    draft_length: int = 0


def plan_memory(
    memory: Memory, budget: int, bandwidth: Bandwidth, formats: Sequence[str], beside: str | None = None
) -> Plan:
    """Return the plan within a budget, in bytes, that promises the most tokens a second.

    Substitutes have one of `formats`; none: nothing drafts. A draft needs those in `beside` even if all layers stay.
    """
    whole = memory.whole(beside)
    if whole.total <= budget:
        return _predicted(whole, bandwidth)
    choices: list[str | None] = [*formats] or [None]
    splits = [split for each in choices for split in _splits(memory, each)]
    # The more layers stay whole, the better; of how many others a part should stay is not as clear.
    most = {(split.format, split.part, split.part and split.end): split for split in splits if split.total <= budget}
    if not most:
        least = min(splits or [Split(memory, 0, each) for each in choices], key=lambda split: split.total)
        raise UnsupportedOptionError(_too_little(budget, least))
    return max((_predicted(split, bandwidth) for split in most.values()), key=lambda plan: plan.drafting or plan.plain)


def _splits(memory: Memory, format: str | None) -> Iterator[Split]:
    """Yield the ways to divide layers of which some are streamed, those with more whole layers later."""
    count = len(memory.layers)
    # Substitutes are not made for a head alone: a layer before it is streamed, too.
    for resident in range(count - (format is not None)):
        if format in memory.parts:
            yield Split(memory, resident, format, count - resident, format)
            continue
        yield Split(memory, resident, format)
        for part in memory.parts if format is not None else ():
            yield from (Split(memory, resident, format, partly, part) for partly in range(1, count - resident))


def _too_little(budget: int, least: Split) -> str:
    memory = least.memory
    remedies = "raise it, or ask for a shorter context"
    if least.format is not None:
        without = shown_bytes(Split(memory, 0, None).total)
        remedies = (
            "raise it, ask for a shorter context, or decode without drafts (draft=False, --draft none), which takes "
            f"{without}"
        )
    all_stay = "" if sum(memory.layers) else "; none of its layers can be streamed, so that all stay in memory"
    return (
        f"memory={shown_bytes(budget)} is too little for this model: it takes at least {shown_bytes(least.total)} "
        f"({least.told}); {remedies}{all_stay}"
    )


def _predicted(split: Split, bandwidth: Bandwidth) -> Plan:
    memory, count, streamed = split.memory, len(split.memory.layers), split.streamed
    kept = memory.kept + split.whole
    # Weights are multiplied while the next ones arrive, and while the host launches what follows.
    target = kept / bandwidth.memory + max(streamed / bandwidth.stream, (streamed + split.parts) / bandwidth.memory)
    target = max(target, (_OF_LAYER * count if streamed else _OF_STEP) * bandwidth.launch)
    plan = Plan(**vars(split), bandwidth=bandwidth, plain=1 / target)
    if split.format is None or not streamed:
        return plan
    # A round of a chain commits (1 - a^(n + 1)) / (1 - a) tokens; verification need not run its first layers again.
    named = [split.part] * split.partly + [split.format] * (count - split.end)
    sizes = memory.layers[split.resident :]
    acceptance = fmean((formats()[name].acceptance for name in named if name is not None), sizes)
    draft = max((kept + split.parts + split.copies) / bandwidth.memory, _OF_STEP * bandwidth.launch)
    speeds = {
        length: (1 - acceptance ** (length + 1)) / (1 - acceptance) / (length * draft + target)
        for length in range(1, LONGEST + 1)
    }
    best = max(speeds, key=lambda length: speeds[length])
    return replace(plan, drafting=speeds[best], draft_step=draft / target, draft_length=best)
