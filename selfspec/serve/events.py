"""What the engine reports of a row: what each round committed, and once how it ended."""

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
