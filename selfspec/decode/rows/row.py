"""One row of a running batch, with all that is its own."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from selfspec.decode.noise import Noise
from selfspec.decode.rows.logprobs import LogprobRecord
from selfspec.decode.sampling import Sampling
from selfspec.decode.sequences import Sequences
from selfspec.decode.stopping import Stopping


@dataclass(eq=False)
class Row:
    """One row: a text, and how it goes on. It outlives the cache it runs in, so that it can be read again.

    Attributes:
        sequences: prompt and committed tokens, a batch of one.
        sampling: of this row; processors may hold a memory of its text.
        stopping: where it ends.
        noise: of this row; while it runs, the batch's noise has moved on.
        kind: equal for rows whose processors look at scores alone and do the same.
        record: keeps log-probabilities of committed tokens; None: nobody asked for them.
        error: what a processor or criterion of this row raised; None: nothing.
    """

    sequences: Sequences
    sampling: Sampling
    stopping: Stopping
    noise: Noise
    kind: Hashable
    record: LogprobRecord | None = None
    error: Exception | None = None

    @property
    def committed(self) -> list[int]:
        """Its new tokens."""
        return self.sequences.committed[0]

    @property
    def length(self) -> int:
        """Tokens of prompt and text."""
        return self.sequences.length(0)

    @property
    def remaining(self) -> int:
        """The most tokens that it may still grow by."""
        return self.stopping.max_new_tokens - len(self.committed)

    @property
    def longest(self) -> int:
        """The most tokens it may come to have, prompt included."""
        return self.length + self.remaining

    @property
    def text(self) -> list[int]:
        """Prompt and committed tokens."""
        return self.sequences.tokens_from(0, 0)
