"""What the engine reports: of a row what each round committed, and once how it ended; of itself its counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from selfspec.decode.logprobs import TokenLogprobs
from selfspec.errors import SelfSpecError

Reason = Literal["stop", "length", "cancelled", "error"]
"""Why a row ended: at an end-of-sequence token or a stopping criterion, at its longest, by its caller, by an error."""


@dataclass(frozen=True)
class Committed:
    """What a round committed: tokens are final.

    Attributes:
        tokens: at least one, an end-of-sequence token included.
        logprobs: of each; None where the request asks for none.
        drafted: draft tokens that were proposed to the row in this round.
        accepted: how many of them are among `tokens`.
        cached: tokens of the prompt that were not read, because a kept cache held them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    drafted: int
    accepted: int
    cached: int = 0


@dataclass(frozen=True)
class Finished:
    """The last event of a row, with the counts of all of it; `error` is None where nothing went wrong."""

    reason: Reason
    error: SelfSpecError | None
    prompt_tokens: int
    completion_tokens: int
    drafted: int
    accepted: int


Event = Committed | Finished


@dataclass(frozen=True)
class EngineStats:
    """Counts of an engine, for metrics, at one moment.

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
