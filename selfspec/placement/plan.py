"""What fits in a byte budget: which layers stay in memory, which are streamed, and in how many bits these draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from selfspec.errors import UnsupportedOptionError
from selfspec.placement.byte_size import shown_bytes

SLOTS = 4
"""Weights in memory at once of those that are streamed: two of experts, and two on their way."""
_TOKENS_AT_ONCE, _SCORED = 1024, 32 * 2**20
"""The most tokens of prompts that a pass reads, of all rows together, and the most numbers of its mask or scores."""
LONGEST = 32
"""Tokens drafted a round, at most."""
GROUP_SIZE = 32
"""Weights of a substitute in 4 bits that share a scale."""
# Acceptance of drafts in 8 and 4 bits, by 1 - TV of the trained checkpoints that were measured.
_ACCEPTANCE = {8: 0.97, 4: 0.9}


def tokens_at_once(context: int, scored_heads: int) -> int:
    """Return how many tokens of prompts a pass reads at most, of all rows together.

    Args:
        context: tokens that the cache holds.
        scored_heads: whose scores attention holds at once; 0: of none.
    """
    return max(1, min(_TOKENS_AT_ONCE, context, _SCORED // (context * max(1, scored_heads))))


@dataclass(frozen=True)
class Memory:
    """What a model takes, in bytes.

    Attributes:
        process: what is in use before the model is loaded; 0 where the budget is a device's.
        kept: weights that always stay: embeddings, norms, and whatever cannot be streamed.
        layers: the weights of each layer that can be streamed, in order; the head, if it can be, is the last.
        largest: the largest weight of these.
        substitutes: of each of these, by bits.
        cache: keys and values of the context.
        working: what a pass needs besides.
        draft: weights of a drafter's own, and its keys and values of the context.
        kept_substitutes: of weights that always stay, by bits; they are made where all layers stay.
    """

    process: int
    kept: int
    layers: tuple[int, ...]
    largest: int
    substitutes: dict[int, tuple[int, ...]]
    cache: int
    working: int
    draft: int = 0
    kept_substitutes: dict[int, int] = field(default_factory=dict)

    @property
    def least(self) -> int:
        """Bytes of all that neither stays away nor has a choice."""
        return self.process + self.kept + self.cache + self.working + self.draft


@dataclass(frozen=True)
class Bandwidth:
    """How fast weights come, in bytes a second: those in memory, and those that are streamed."""

    memory: float
    stream: float


@dataclass(frozen=True)
class Plan:
    """What stays in memory, and what does not.

    Attributes:
        resident: layers that stay, from the first on; the head counts as the layer after the last.
        streamed: bytes that a target pass streams.
        bits: of the substitutes that draft for streamed layers; None: there are none.
        total: bytes that all of it takes.
        bandwidth: that it was made for.
        plain: steps of plain decoding a second, predicted.
        drafting: tokens a second with drafts, predicted; None: there are none.
        draft_step: c, predicted; None: there are no drafts.
        draft_length: tokens drafted a round, best by the prediction.
    """

    resident: int
    streamed: int
    bits: int | None
    total: int
    bandwidth: Bandwidth
    plain: float
    drafting: float | None = None
    draft_step: float | None = None
    draft_length: int = 0


def plan_memory(
    memory: Memory, budget: int, bandwidth: Bandwidth, bits: Sequence[int], beside: int | None = None
) -> Plan:
    """Plan what stays in memory: whatever promises the most tokens a second within a budget in bytes.

    Args:
        memory: what the model takes.
        budget: in bytes.
        bandwidth: of this machine.
        bits: that substitutes may have; none: nothing drafts.
        beside: bits of the substitutes that a draft needs even where all layers stay in memory; None: it needs none.

    Raises:
        UnsupportedOptionError: nothing fits; the message says how much is needed.
    """
    if _total(memory, len(memory.layers), beside) <= budget:
        return _predicted(memory, len(memory.layers), beside, bandwidth)
    choices: list[int | None] = [*bits] or [None]
    plans = []
    for each in choices:
        resident = _most_resident(memory, each, budget)
        if resident is not None:
            plans.append(_predicted(memory, resident, each, bandwidth))
    if not plans:
        raise UnsupportedOptionError(_too_little(memory, budget, choices))
    return max(plans, key=lambda plan: plan.drafting or plan.plain)


def _too_little(memory: Memory, budget: int, choices: Sequence[int | None]) -> str:
    """Say how much is needed, for what, and what helps."""
    bits = min(choices, key=lambda each: _total(memory, 0, each))
    least = _total(memory, 0, bits)
    parts = {
        "for the process": memory.process,
        "for weights that stay": memory.kept,
        "for weights on their way": SLOTS * memory.largest,
        "for copies that draft": 0 if bits is None else sum(memory.substitutes[bits]),
        "for keys and values": memory.cache,
        "for the draft's own weights, keys and values": memory.draft,
        "to work with": memory.working,
    }
    told = ", ".join(f"{shown_bytes(size)} {what}" for what, size in parts.items() if size)
    remedies = "raise it, or ask for a shorter context"
    if bits is not None:
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


def _most_resident(memory: Memory, bits: int | None, budget: int) -> int | None:
    # A head alone is not drafted for: a layer before it is streamed, too.
    most = len(memory.layers) - (bits is not None)
    fitting = [count for count in range(most) if _total(memory, count, bits) <= budget]
    return max(fitting, default=None)


def _total(memory: Memory, resident: int, bits: int | None) -> int:
    if resident == len(memory.layers):
        copies = 0 if bits is None else sum(memory.substitutes[bits]) + memory.kept_substitutes.get(bits, 0)
        return memory.least + sum(memory.layers) + copies
    substitutes = 0 if bits is None else sum(memory.substitutes[bits][resident:])
    return memory.least + sum(memory.layers[:resident]) + substitutes + SLOTS * memory.largest


def _predicted(memory: Memory, resident: int, bits: int | None, bandwidth: Bandwidth) -> Plan:
    streamed = sum(memory.layers[resident:])
    kept = memory.kept + sum(memory.layers[:resident])
    # Weights are multiplied while the next ones come.
    target = kept / bandwidth.memory + max(streamed / bandwidth.stream, streamed / bandwidth.memory)
    total = _total(memory, resident, bits)
    if bits is None or not streamed:
        return Plan(resident, streamed, bits, total, bandwidth, 1 / target)
    substitutes = sum(memory.substitutes[bits][resident:])
    # Of a chain whose first layers verification need not run again, (1 - a^(n + 1)) / (1 - a) tokens a round.
    acceptance = _ACCEPTANCE[bits]
    draft = (kept + substitutes) / bandwidth.memory
    speeds = {
        length: (1 - acceptance ** (length + 1)) / (1 - acceptance) / (length * draft + target)
        for length in range(1, LONGEST + 1)
    }
    best = max(speeds, key=lambda length: speeds[length])
    return Plan(resident, streamed, bits, total, bandwidth, 1 / target, speeds[best], draft / target, best)
