"""The text of every row as `transformers` would hold it: the prompt with its padding, then what was committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Text:
    """Prompts and the tokens committed after them.

    Every row's prefix is what `transformers` hands to logits processors and stopping criteria: the row as it was
    given, left padding included, and then its own tokens. Rows may differ in length by what was accepted of them.

    Args:
        prompts: as given, left-padded, `[batch, prompt]`. Everything is handed out on their device.
        pad: stands after rows that are shorter than others.

    Attributes:
        committed: the new tokens of each row, final. Append to them; nothing else is to be done.
        live: whether each row goes on.
        rows: numbers of the rows that passes still run; a row that has ended may be left out.
        width: length of the prompts, padding included.
        pad: stands after rows that are shorter than others.
    """

    def __init__(self, prompts: Tensor, pad: int) -> None:
        self.committed: list[list[int]] = [[] for _ in range(prompts.shape[0])]
        self.live = [True] * prompts.shape[0]
        self.rows = list(range(prompts.shape[0]))
        self.width = prompts.shape[1]
        self.pad = pad
        self._prompts = prompts

    def length(self, row: int) -> int:
        """Tokens of a row so far, prompt and padding included."""
        return self.width + len(self.committed[row])

    def tokens_from(self, row: int, start: int) -> list[int]:
        """The tokens of a row from position `start` on, padding counted and included."""
        if start >= self.width:
            return self.committed[row][start - self.width :]
        prompt: list[int] = self._prompts[row, start:].tolist()
        return prompt + self.committed[row]

    def followed_by(self, runs: Sequence[Sequence[int]]) -> Tensor:
        """The ids of all rows with a run of tokens after each, padded on the right to the longest, `[batch, length]`.

        Args:
            runs: for each row, tokens that are not committed.
        """
        new = [[*tokens, *run] for tokens, run in zip(self.committed, runs, strict=True)]
        longest = max(map(len, new))
        padded = [tokens + [self.pad] * (longest - len(tokens)) for tokens in new]
        after = torch.tensor(padded, dtype=self._prompts.dtype).reshape(len(new), longest)
        return torch.cat([self._prompts, after.to(self._prompts.device)], 1)


@dataclass(frozen=True)
class Prefixes:
    """What stands before each place of a block: the committed text, and the draft tokens up to there.

    A block over m places belongs to the last m places of text and draft: to the one after each of the last m - 1 draft
    tokens, and to the one before these.

    Attributes:
        text: committed.
        drafted: pieces of the draft so far, in order, each `[rows, tokens]`, of the rows that passes run. Only looked
            at by processors that read prefixes.
    """

    text: Text
    drafted: Sequence[Tensor] = ()

    @property
    def length(self) -> int:
        """Draft tokens so far."""
        return sum(piece.shape[1] for piece in self.drafted)

    def runs(self) -> list[list[int]]:
        """The draft tokens of each row, none for rows that have ended. Waits for the device."""
        runs: list[list[int]] = [[] for _ in self.text.committed]
        if self.drafted:
            for row, run in zip(self.text.rows, torch.cat(list(self.drafted), 1).tolist(), strict=True):
                runs[row] = run if self.text.live[row] else []
        return runs
