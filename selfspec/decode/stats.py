"""Statistics of a generation, counted from its committed rounds, and the time of each phase."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from selfspec.device import backend, has_streams
from selfspec.draft.verdict import Verdict


@dataclass
class Stats:
    """Counts and times of one generation, over all its rows.

    Attributes:
        rounds: rounds of propose, verify, judge and commit, with one target pass each.
        row_rounds: rounds of each unfinished row, summed over rows; equals `rounds` for a batch of one.
        new_tokens: tokens committed.
        drafted: draft tokens of unfinished rows, judged or not.
        judged: draft tokens that the target judged; siblings in a tree count as one. Not counted: tokens after a
            rejected one, after the end of the row, and after the place where lockstep cuts the row.
        accepted: draft tokens committed.
        overlap: for coupled drafts, the sum of 1 - TV(p, q) over the judged tokens.
        judged_per_depth: `judged` by depth in the draft, first token first.
        accepted_per_depth: `accepted` by depth in the draft.
        cache_bytes: most bytes allocated for keys and values.
        substitute_bytes: bytes of the substitutes made for the model so far.
        draft_bytes: bytes of the drafter itself: the weights, keys and values of an assistant, the table of recycling.
        seconds: wall time by phase: prefill, draft, verify, accept, commit.
    """

    rounds: int = 0
    row_rounds: int = 0
    new_tokens: int = 0
    drafted: int = 0
    overlap: float = 0.0
    judged_per_depth: list[int] = field(default_factory=list)
    accepted_per_depth: list[int] = field(default_factory=list)
    cache_bytes: int = 0
    substitute_bytes: int = 0
    draft_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def judged(self) -> int:
        """Number of draft tokens that the target judged."""
        return sum(self.judged_per_depth)

    @property
    def accepted(self) -> int:
        """Number of draft tokens committed."""
        return sum(self.accepted_per_depth)

    @property
    def acceptance_rate(self) -> float:
        """Alpha of Leviathan et al. (2023): accepted per judged draft token. NaN if none was judged."""
        return self.accepted / self.judged if self.judged else float("nan")

    @property
    def optimal_acceptance_rate(self) -> float:
        """Mean of 1 - TV(p, q) for coupled drafts, the highest acceptance rate of any rule. NaN for other drafts."""
        return self.overlap / self.judged if self.overlap else float("nan")

    @property
    def mean_accepted_length(self) -> float:
        """Number of tokens committed per target pass of a row, bonus token included. NaN before the first round."""
        return self.new_tokens / self.row_rounds if self.row_rounds else float("nan")

    def count(self, nodes: int, depth: int, verdict: Verdict) -> None:
        """Count a round by the places of the draft that it committed.

        A draft token counts if its place was committed, with this token or another one. Lockstep drops places because
        of other rows, never because of their own verdict, so the acceptance rate is that of the rule.
        """
        self.rounds += 1
        for row in verdict.rows.values():
            count = len(row.tokens)
            self.row_rounds += 1
            self.drafted += nodes
            self.new_tokens += count
            self.overlap += row.overlap_of(count)
            _add(self.judged_per_depth, depth, row.judged_of(count))
            _add(self.accepted_per_depth, depth, row.accepted_of(count))

    @classmethod
    def together(cls, parts: Sequence[Stats]) -> Stats:
        """Return the counts of several generations as one, with the most bytes of any of them."""
        seconds: Counter[str] = Counter()
        for part in parts:
            seconds.update(part.seconds)
        return cls(
            rounds=sum(part.rounds for part in parts),
            row_rounds=sum(part.row_rounds for part in parts),
            new_tokens=sum(part.new_tokens for part in parts),
            drafted=sum(part.drafted for part in parts),
            overlap=sum(part.overlap for part in parts),
            judged_per_depth=_summed([part.judged_per_depth for part in parts]),
            accepted_per_depth=_summed([part.accepted_per_depth for part in parts]),
            cache_bytes=max(part.cache_bytes for part in parts),
            substitute_bytes=max(part.substitute_bytes for part in parts),
            draft_bytes=max(part.draft_bytes for part in parts),
            seconds=dict(seconds),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all counts, rates and times, ready for JSON; a rate without data is None."""
        derived = {
            "judged": self.judged,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate if self.judged else None,
            "optimal_acceptance_rate": self.optimal_acceptance_rate if self.overlap else None,
            "mean_accepted_length": self.mean_accepted_length if self.row_rounds else None,
        }
        return {**asdict(self), **derived}


def _summed(counts: Sequence[list[int]]) -> list[int]:
    return [sum(at_depth) for at_depth in zip_longest(*counts, fillvalue=0)]


def _add(counts: list[int], positions: int, first: int) -> None:
    """Add 1 to each of the first `first` counts, of at least `positions`."""
    counts.extend([0] * (positions - len(counts)))
    for position in range(first):
        counts[position] += 1


class PhaseClock:
    """Sums wall time by phase. On devices with streams it records events and reads them at the end: no phase waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block towards `name`."""
        if has_streams(self._device):
            begin, end = (backend(self._device).Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        started = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase so far. Waits for the device."""
        for name, begin, end in self._events:
            end.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000
        self._events.clear()
        return dict(self._seconds)
