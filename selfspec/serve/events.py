"""What the engine reports: of a row what each round committed, and once how it ended; of itself its counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from selfspec.decode.output import TokenLogprobs
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


class Shown(NamedTuple):
    """A metric that shows a count: its kind and name, and what it is."""

    kind: Literal["gauge", "counter"]
    name: str
    words: str


@dataclass(frozen=True)
class EngineStats:
    """Counts of an engine at one moment, and how metrics show them; `finished` has rows by `Finished.reason`."""

    running: int
    prefilling: int
    waiting: Annotated[int, Shown("gauge", "vllm:num_requests_waiting", "Requests that wait for room.")]
    cache_bytes: Annotated[int, Shown("gauge", "selfspec:cache_bytes", "Bytes of keys, values and states.")]
    kept_bytes: Annotated[int, Shown("gauge", "selfspec:kept_cache_bytes", "Bytes of the caches of ended rows.")]
    cache_bound: Annotated[int, Shown("gauge", "selfspec:cache_bound_bytes", "The most of them that there may be.")]
    prompt_tokens: Annotated[int, Shown("counter", "vllm:prompt_tokens", "Tokens of prompts that were read.")]
    asked_tokens: Annotated[int, Shown("counter", "vllm:prefix_cache_queries", "Tokens of texts to be read.")]
    cached_tokens: Annotated[int, Shown("counter", "vllm:prefix_cache_hits", "Those that kept caches held.")]
    committed: Annotated[int, Shown("counter", "vllm:generation_tokens", "Tokens that were committed.")]
    preemptions: Annotated[int, Shown("counter", "vllm:num_preemptions", "Rows that were to be read again.")]
    drafted: Annotated[int, Shown("counter", "vllm:spec_decode_num_draft_tokens", "Tokens that were proposed.")]
    accepted: Annotated[int, Shown("counter", "vllm:spec_decode_num_accepted_tokens", "Those that were accepted.")]
    rounds: Annotated[int, Shown("counter", "selfspec:rounds", "Rounds of the running batch.")]
    plain_rounds: Annotated[int, Shown("counter", "selfspec:plain_rounds", "Rounds without a draft.")]
    finished: dict[str, int]
