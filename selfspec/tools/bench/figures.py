"""Figures of an arm in a cell, from its raw times and counts: speeds, and ratios repeat by repeat."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from selfspec.decode.stats import Stats
from selfspec.measure.estimate import Estimate
from selfspec.tools.bench.record import Record

CYCLING = 0.1
"""Texts with a larger share of their tokens inside repeating cycles are left out of the figures without cycles."""

Speeds = Callable[[Record, Sequence[int]], list[float]]
"""Tokens per second of an arm over some of the calls, one figure for each repeat."""


def whole_call(record: Record, calls: Sequence[int]) -> list[float]:
    """Tokens per second over whole calls, prefill included."""
    return [
        sum(tokens[call] for call in calls) / sum(seconds[call] for call in calls)
        for tokens, seconds in zip(record.tokens, record.seconds, strict=True)
    ]


def decoding(record: Record, calls: Sequence[int]) -> list[float]:
    """Tokens per second after the first tokens, so without prefill."""
    times = zip(record.tokens, record.first_tokens, record.seconds, record.first_seconds, strict=True)
    return [
        sum(tokens[call] - first_tokens[call] for call in calls)
        / sum(seconds[call] - first_seconds[call] for call in calls)
        for tokens, first_tokens, seconds, first_seconds in times
    ]


def all_calls(record: Record) -> list[int]:
    """The number of every call."""
    return list(range(len(record.seconds[0])))


def calls_without_cycles(reference: Record) -> list[int]:
    """The calls whose texts by the reference arm hardly repeat themselves: no more than `CYCLING` of their tokens."""
    return [call for call in all_calls(reference) if _cycle_share(reference, call) <= CYCLING]


def cycle_share(record: Record) -> float:
    """Share of all tokens inside repeating cycles."""
    return statistics.mean(_cycle_share(record, call) for call in all_calls(record))


def speed(record: Record, speeds: Speeds, calls: Sequence[int] | None = None) -> Estimate:
    """Tokens per second, of all rows together."""
    return Estimate.of_median(speeds(record, all_calls(record) if calls is None else calls))


def ratio(record: Record, reference: Record, speeds: Speeds, calls: Sequence[int] | None = None) -> Estimate:
    """Speed against another arm's, taken repeat by repeat, since both met the same troubles in a repeat."""
    which = all_calls(record) if calls is None else calls
    pairs = zip(speeds(record, which), speeds(reference, which), strict=True)
    return Estimate.of_median([own / other for own, other in pairs])


def first_token_seconds(record: Record) -> Estimate:
    """Time until the first tokens of a call stand; of each repeat the mean over calls."""
    return Estimate.of_median([statistics.mean(repeat) for repeat in record.first_seconds])


def mean_accepted_length(record: Record) -> float:
    """Tokens committed per target pass of a row, by selfspec's own count; of other arms by calls of the model."""
    if record.counts is not None:
        return record.counts.mean_accepted_length
    return sum(map(sum, record.tokens)) / (sum(map(sum, record.passes)) * record.cell.batch)


def acceptance_by_depth(counts: Stats) -> list[float | None]:
    """Share of judged draft tokens that were accepted, at each depth of the draft; None without any."""
    pairs = zip(counts.accepted_per_depth, counts.judged_per_depth, strict=True)
    return [accepted / judged if judged else None for accepted, judged in pairs]


def _cycle_share(record: Record, call: int) -> float:
    return statistics.mean(repeat[call] for repeat in record.cycle_share)
