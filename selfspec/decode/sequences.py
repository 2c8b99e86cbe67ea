"""Each row as `transformers` would hold it: the prompt with its padding, then the committed tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class Sequences:
    """Holds left-padded prompts, `[batch, prompt]`, and the tokens committed after them, as processors see them.

    `pad` fills shorter rows. `mask` says which columns of the prompts are text; None: passes read other inputs.

    Attributes:
        committed: new tokens of each row, final; only append to them.
        unfinished: numbers of the rows that have not ended.
        running: numbers of the rows that passes run, in tensor order; finished rows run until they are dropped.
        text_ends: by row, the number of new tokens at which a text ended that is then only filled up.
    """

    def __init__(self, prompts: Tensor, pad: int, mask: Tensor | None = None) -> None:
        rows = range(prompts.shape[0])
        self.committed: list[list[int]] = [[] for _ in rows]
        self.unfinished = set(rows)
        self.running = list(rows)
        self.text_ends: dict[int, int] = {}
        self.width = prompts.shape[1]
        self.pad = pad
        self._prompts = prompts
        self._mask = mask

    @property
    def are_text(self) -> bool:
        """True if passes read these ids alone: no embeddings, and no past of other tokens."""
        return self._mask is not None

    def length(self, row: int) -> int:
        """Count the tokens of a row, prompt and padding included."""
        return self.width + len(self.committed[row])

    @property
    def shortest(self) -> int:
        """Number of tokens of the shortest running row, prompt and padding included."""
        return min(map(self.length, self.running))

    def text_length(self, row: int) -> int:
        """Count the tokens of a row's text, prompt included, padding excluded."""
        return len(self._texts[row]) + len(self.committed[row])

    def text_from(self, row: int, start: int) -> list[int]:
        """Return the tokens of a row's text from token `start` on, padding neither counted nor included."""
        new = start - len(self._texts[row])
        if new >= 0:
            return self.committed[row][new:]
        return self._texts[row][start:] + self.committed[row]

    @cached_property
    def _texts(self) -> list[list[int]]:
        """Prompts without padding, copied to the host once: a copy in each round would wait for the device."""
        prompts: list[list[int]] = self._prompts.tolist()
        if self._mask is None:
            return prompts
        each = zip(prompts, self._mask.tolist(), strict=True)
        return [[token for token, kept in zip(ids, mask, strict=True) if kept] for ids, mask in each]

    def followed_by(self, runs: Sequence[Sequence[int]]) -> Tensor:
        """Return the ids of all rows, each followed by its uncommitted run, padded right, `[batch, length]`."""
        new = [[*tokens, *run] for tokens, run in zip(self.committed, runs, strict=True)]
        longest = max(map(len, new))
        padded = [tokens + [self.pad] * (longest - len(tokens)) for tokens in new]
        after = torch.tensor(padded, dtype=self._prompts.dtype).reshape(len(new), longest)
        return torch.cat([self._prompts, after.to(self._prompts.device)], 1)


@dataclass(frozen=True)
class Prefixes:
    """The prefix of each place of a block: the committed tokens, and the draft tokens up to the place.

    A block of m places has one before the last m - 1 draft tokens, and one after each. `drafted` holds the running
    rows' draft in pieces, `[rows, tokens]`; only processors that depend on the prefix read it.
    """

    sequences: Sequences
    drafted: Sequence[Tensor] = ()

    @property
    def length(self) -> int:
        return sum(piece.shape[1] for piece in self.drafted)

    def runs(self) -> list[list[int]]:
        """Return the draft tokens of each row of the batch, none for finished rows. Waits for the device."""
        runs: list[list[int]] = [[] for _ in self.sequences.committed]
        if self.drafted:
            drafted = torch.cat(list(self.drafted), 1).tolist()
            for row, run in zip(self.sequences.running, drafted, strict=True):
                runs[row] = run if row in self.sequences.unfinished else []
        return runs


def first_end(run: Sequence[int], eos: Collection[int]) -> int:
    """Return the index of a run's first end-of-sequence token; its length if it has none."""
    return next((index for index, token in enumerate(run) if token in eos), len(run))
