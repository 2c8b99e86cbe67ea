"""Plan for a byte budget which layers stay in memory, which are streamed, and in which format these draft."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from selfspec.arguments import shown
from selfspec.errors import UnsupportedOptionError
from selfspec.formats.format import copies

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
_TOKENS_AT_ONCE, _SCORED = 1024, 32 * 2**20
"""The most tokens of prompts in a pass, of all rows together, and the most numbers in its mask or scores."""
LONGEST = 32
"""The most tokens drafted each round."""


def tokens_at_once(context: int, scored_heads: int) -> int:
    """Return the most tokens of prompts that a pass reads, of all rows together."""
    return max(1, min(_TOKENS_AT_ONCE, context, _SCORED // (context * max(1, scored_heads))))


@dataclass(frozen=True)
class Memory:
    """Counts the bytes of memory that a model takes.

    Attributes:
        process: in use before the model is loaded; 0 where the budget limits a device.
        kept: weights that always stay: embeddings, norms, and all that cannot be streamed.
        layers: streamable weights of each layer; the head, if it can be streamed, is the last layer.
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

    @property
    def least(self) -> int:
        """Bytes that every plan takes."""
        return self.process + self.kept + self.cache + self.working + self.draft


@dataclass(frozen=True)
class Bandwidth:
    """Gives the bytes a second at which weights are read from memory, and streamed."""

    memory: float
    stream: float


@dataclass(frozen=True)
class Plan:
    """Says what stays in memory and what is streamed.

    Attributes:
        resident: number of layers that stay, from the first; the head counts as the layer after the last.
        streamed: bytes that a target pass streams.
        plain: predicted steps of plain decoding a second.
        drafting: predicted tokens a second with drafts; None: there are no drafts.
        draft_step: predicted c; None: there are no drafts.
    """

    resident: int
    streamed: int
    format: str | None
    total: int
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
    if _total(memory, len(memory.layers), beside) <= budget:
        return _predicted(memory, len(memory.layers), beside, bandwidth)
    choices: list[str | None] = [*formats] or [None]
    plans = []
    for each in choices:
        resident = _most_resident(memory, each, budget)
        if resident is not None:
            plans.append(_predicted(memory, resident, each, bandwidth))
    if not plans:
        raise UnsupportedOptionError(_too_little(memory, budget, choices))
    return max(plans, key=lambda plan: plan.drafting or plan.plain)


def _too_little(memory: Memory, budget: int, choices: Sequence[str | None]) -> str:
    format = min(choices, key=lambda each: _total(memory, 0, each))
    least = _total(memory, 0, format)
    parts = {
        "for the process": memory.process,
        "for weights that stay": memory.kept,
        "for weights on their way": SLOTS * memory.largest,
        "for copies that draft": 0 if format is None else sum(memory.substitutes[format]),
        "for keys and values": memory.cache,
        "for the draft's own weights, keys and values": memory.draft,
        "to work with": memory.working,
    }
    told = ", ".join(f"{shown_bytes(size)} {what}" for what, size in parts.items() if size)
    remedies = "raise it, or ask for a shorter context"
    if format is not None:
        without = shown_bytes(_total(memory, 0, None))
        remedies = (
            "raise it, ask for a shorter context, or decode without drafts (draft=False, --draft none), which takes "
            f"{without}"
        )
    all_stay = "" if sum(memory.layers) else "; none of its layers can be streamed, so that all stay in memory"
    return (
        f"memory={shown_bytes(budget)} is too little for this model: it takes at least {shown_bytes(least)} ({told}); "
        f"{remedies}{all_stay}"
    )


def _most_resident(memory: Memory, format: str | None, budget: int) -> int | None:
    # Substitutes are not made for a head alone: a layer before it is streamed, too.
    most = len(memory.layers) - (format is not None)
    fitting = [count for count in range(most) if _total(memory, count, format) <= budget]
    return max(fitting, default=None)


def _total(memory: Memory, resident: int, format: str | None) -> int:
    if resident == len(memory.layers):
        copies = 0 if format is None else sum(memory.substitutes[format]) + memory.kept_substitutes.get(format, 0)
        return memory.least + sum(memory.layers) + copies
    substitutes = 0 if format is None else sum(memory.substitutes[format][resident:])
    return memory.least + sum(memory.layers[:resident]) + substitutes + SLOTS * memory.largest


def _predicted(memory: Memory, resident: int, format: str | None, bandwidth: Bandwidth) -> Plan:
    streamed = sum(memory.layers[resident:])
    kept = memory.kept + sum(memory.layers[:resident])
    # Weights are multiplied while the next ones arrive.
    target = kept / bandwidth.memory + max(streamed / bandwidth.stream, streamed / bandwidth.memory)
    total = _total(memory, resident, format)
    if format is None or not streamed:
        return Plan(resident, streamed, format, total, bandwidth, 1 / target)
    substitutes = sum(memory.substitutes[format][resident:])
    # A round of a chain commits (1 - a^(n + 1)) / (1 - a) tokens; verification need not run its first layers again.
    acceptance = copies()[format].acceptance
    draft = (kept + substitutes) / bandwidth.memory
    speeds = {
        length: (1 - acceptance ** (length + 1)) / (1 - acceptance) / (length * draft + target)
        for length in range(1, LONGEST + 1)
    }
    best = max(speeds, key=lambda length: speeds[length])
    return Plan(resident, streamed, format, total, bandwidth, 1 / target, speeds[best], draft / target, best)
