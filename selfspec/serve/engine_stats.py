"""What the engine counts, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """A snapshot.

    Attributes:
        running: rows in the running batch.
        prefilling: rows whose prompt is being read.
        waiting: requests that wait for room.
        cache_bytes: allocated for keys, values and states of rows that run or are read.
        kept_bytes: of those of rows that have ended.
        asked_tokens: tokens of texts that were to be read.
        cached_tokens: those of them that kept caches held.
        cache_bound: the most that may be.
        rounds: rounds of the running batch so far.
        plain_rounds: those of them without a draft.
        prompt_tokens: tokens of prompts that were read, those read again after a preemption included.
        committed: tokens committed.
        drafted: draft tokens that were proposed.
        accepted: how many of them were committed.
        preemptions: how often a row gave its cache back and was read again.
        finished: rows that ended, by `Finished.reason`.
    """

    running: int
    prefilling: int
    waiting: int
    cache_bytes: int
    kept_bytes: int
    asked_tokens: int
    cached_tokens: int
    cache_bound: int
    rounds: int
    plain_rounds: int
    prompt_tokens: int
    committed: int
    drafted: int
    accepted: int
    preemptions: int
    finished: dict[str, int]
