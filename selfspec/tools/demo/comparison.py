"""Plain decoding and self-speculation on the same prompts, in turns, so that a busy machine troubles all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.api import SelfSpeculative, wrap
from selfspec.control.draft_policy import DraftPolicy
from selfspec.decode.stats import Stats
from selfspec.draft import Drafter
from selfspec.measure.cycles import cycle_share
from selfspec.measure.peak_memory import peak_memory

STOCK = "model.generate"
PLAIN = "selfspec plain"
DRAFTING = "selfspec drafting"
_SEED = 0


@dataclass
class Arm:
    """One way to decode, and what was measured of it.

    Attributes:
        name: what it is called.
        decode: new tokens and counts for one prompt, `[1, prompt]`.
        tokens: new tokens of each prompt.
        stats: counts of each prompt; empty for `model.generate`, which keeps none.
        tokens_per_second: one value for each repeat, over all prompts.
        peak_bytes: memory above the level before, over all prompts; None where unknown.
    """

    name: str
    decode: Callable[[Tensor], Decoded]
    tokens: list[list[int]] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def median(self) -> float:
        """Median tokens per second."""
        return statistics.median(self.tokens_per_second)

    @property
    def new_tokens(self) -> int:
        """New tokens of all prompts."""
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def cycle_share(self) -> float:
        """Share of the new tokens inside repeating cycles, which flatter any draft."""
        return sum(cycle_share(tokens) * len(tokens) for tokens in self.tokens) / self.new_tokens

    def to_dict(self) -> dict[str, Any]:
        """What was measured, ready for JSON."""
        return {
            "new_tokens": self.new_tokens,
            "cycle_share": self.cycle_share,
            "tokens_per_second": {
                "median": self.median,
                "lowest": min(self.tokens_per_second),
                "highest": max(self.tokens_per_second),
                "repeats": self.tokens_per_second,
            },
            "peak_bytes": self.peak_bytes,
            "stats": [stats.to_dict() for stats in self.stats],
        }


@dataclass(frozen=True)
class Decoded:
    """One prompt's new tokens, and its counts where the arm keeps any."""

    tokens: list[int]
    stats: Stats | None


@dataclass(frozen=True)
class Total:
    """Counts over all prompts.

    Attributes:
        mean_accepted_length: tokens committed per target pass, bonus token included.
        mean_draft_length: tokens drafted per target pass.
        acceptance_rate: share of judged draft tokens that were accepted; None without any.
        accepted_per_depth: draft tokens accepted, by depth in the draft.
        judged_per_depth: draft tokens the target judged, by depth in the draft.
        draft_share: share of the time that drafting took.
        cache_bytes: the largest KV cache of any prompt.
    """

    mean_accepted_length: float
    mean_draft_length: float
    acceptance_rate: float | None
    accepted_per_depth: list[int]
    judged_per_depth: list[int]
    draft_share: float
    cache_bytes: int

    @classmethod
    def of(cls, stats: Sequence[Stats]) -> Total:
        """The counts of several generations as one."""
        accepted = _summed([each.accepted_per_depth for each in stats])
        judged = _summed([each.judged_per_depth for each in stats])
        drafted = sum(each.drafted for each in stats)
        drafting = sum(each.seconds["draft"] for each in stats)
        row_rounds = sum(each.row_rounds for each in stats)
        return cls(
            mean_accepted_length=sum(each.new_tokens for each in stats) / row_rounds,
            mean_draft_length=drafted / row_rounds,
            acceptance_rate=sum(accepted) / sum(judged) if sum(judged) else None,
            accepted_per_depth=accepted,
            judged_per_depth=judged,
            draft_share=drafting / sum(sum(each.seconds.values()) for each in stats),
            cache_bytes=max(each.cache_bytes for each in stats),
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """What the demonstration measured at one temperature.

    Attributes:
        stock: `model.generate`.
        plain: selfspec without a draft.
        drafting: selfspec with one.
    """

    stock: Arm
    plain: Arm
    drafting: Arm

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All three."""
        return (self.stock, self.plain, self.drafting)

    @property
    def identical(self) -> list[bool]:
        """For each prompt, whether all three gave the same tokens."""
        rows = zip(*(arm.tokens for arm in self.arms), strict=True)
        return [all(tokens == row[0] for tokens in row) for row in rows]

    @property
    def fastest_plain(self) -> Arm:
        """The faster of the two that do not draft."""
        return max(self.stock, self.plain, key=lambda arm: arm.median)

    @property
    def speedup(self) -> float:
        """Median speed of drafting by that of the fastest plain decoding."""
        return self.drafting.median / self.fastest_plain.median


def compare(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    drafter: Drafter | DraftPolicy | str,
    draft_length: int | None,
    max_new_tokens: int,
    temperature: float,
    repeats: int,
    tick: Callable[[], None],
) -> Comparison:
    """Decode each prompt in all three ways.

    Each way first runs twice untimed, once to warm up and once to measure its memory; then all are timed in turns.

    Args:
        model: of a supported architecture.
        prompts: each `[1, prompt]`.
        drafter: what drafts, as `wrap` takes it.
        draft_length: tokens drafted each round; None: as many as pay.
        max_new_tokens: the most tokens for each prompt.
        temperature: 0 decodes greedily.
        repeats: how often each way is timed, at least 1.
        tick: called once for each of `runs(repeats)` runs.

    Raises:
        DraftConfigError, PromptError: before any forward pass.
    """
    drafting, plain = wrap(model, draft=drafter, draft_length=draft_length), wrap(model)
    # Texts of one length, whatever ends a text would: else the arms would not do the same work.
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_id": None, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0}
    comparison = Comparison(
        # Self-speculation warms up first, because it refuses what it cannot do.
        drafting=Arm(DRAFTING, lambda prompt: _self_speculative(drafting, prompt, options)),
        plain=Arm(PLAIN, lambda prompt: _self_speculative(plain, prompt, options)),
        stock=Arm(STOCK, lambda prompt: _stock(model, prompt, options)),
    )
    arms = comparison.arms[::-1]
    for arm in arms:
        arm.decode(prompts[0])
        tick()
    for arm in arms:
        arm.peak_bytes = peak_memory(lambda arm=arm: _run(arm, prompts), model.device)  # type: ignore[misc]
        tick()
    for repeat in range(repeats):
        for index in range(len(arms)):
            arm = arms[(index + repeat) % len(arms)]
            started = time.perf_counter()
            _run(arm, prompts)
            arm.tokens_per_second.append(arm.new_tokens / (time.perf_counter() - started))
            tick()
    return comparison


def runs(repeats: int) -> int:
    """How many runs `compare` makes."""
    return 3 * (2 + repeats)


def _run(arm: Arm, prompts: Sequence[Tensor]) -> None:
    decoded = [arm.decode(prompt) for prompt in prompts]
    arm.tokens = [each.tokens for each in decoded]
    arm.stats = [each.stats for each in decoded if each.stats is not None]


def _self_speculative(spec: SelfSpeculative, prompt: Tensor, options: Mapping[str, Any]) -> Decoded:
    output = spec.generate(prompt, seed=_SEED, **options)
    return Decoded(output.sequences[0, prompt.shape[1] :].tolist(), output.stats)


def _stock(model: PreTrainedModel, prompt: Tensor, options: Mapping[str, Any]) -> Decoded:
    mask = torch.ones_like(prompt)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        sequences = model.generate(prompt, attention_mask=mask, **options)
    assert isinstance(sequences, Tensor)
    return Decoded(sequences[0, prompt.shape[1] :].tolist(), None)


def _summed(counts: Sequence[list[int]]) -> list[int]:
    longest = max(map(len, counts))
    return [sum(each[position] for each in counts if position < len(each)) for position in range(longest)]
