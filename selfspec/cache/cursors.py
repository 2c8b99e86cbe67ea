"""Where each row of the cache is, and so which slots a pass writes and sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

_SMALLEST_ROOM = 64


class Cursors:
    """Where each row stands, and so which slots a pass writes and looks at.

    Attributes:
        lengths: cursor of each row, in slots.
        ahead: how many tokens every cursor stands past its last commit.
        limit: the most tokens a row may come to hold, prompt included.
        capacity: slots a row has, or will have with the next pass.
        device: where slot numbers are made.
        aligned: on which side passes find the rows of a ragged batch aligned.
        bucket: passes of a round look at a multiple of so many slots, or at all there are.
    """

    def __init__(
        self, batch: int, limit: int, slack: int, device: torch.device, aligned: Literal["left", "right"], bucket: int
    ) -> None:
        self.lengths = [0] * batch
        self.ahead = 0
        self.limit = limit
        self.device = device
        self.aligned = aligned
        self.bucket = bucket
        self._slack = slack
        self._room = min(_SMALLEST_ROOM, limit)

    @property
    def capacity(self) -> int:
        """Slots a row has, or will have with the next pass."""
        return self._room + self._slack

    @property
    def uniform(self) -> bool:
        """Whether all cursors are equal."""
        return all(length == self.lengths[0] for length in self.lengths)

    def move(self, tokens: int) -> None:
        """Move every cursor over `tokens` tokens that are not committed, or back."""
        self.ahead += tokens
        self.lengths = [length + tokens for length in self.lengths]

    def settle(self, tokens: Sequence[int]) -> int:
        """Move each cursor over its own number of tokens, to stay; returns how far all stood ahead before."""
        ahead, self.ahead = self.ahead, 0
        self.lengths = [length + count for length, count in zip(self.lengths, tokens, strict=True)]
        return ahead

    def make_room(self, committed: int) -> None:
        """Double the room until it holds `committed` tokens, but never beyond the limit."""
        while self._room < min(committed, self.limit):
            self._room = min(2 * self._room, self.limit)

    def visible(self, width: int) -> int:
        """Number of slots, from the first, that a pass over `width` tokens looks at."""
        needed = max(self.lengths) + width
        if not self.padded(width):
            return needed
        return min(-(-needed // self.bucket) * self.bucket, self.capacity)

    def padded(self, width: int) -> bool:
        """Whether a pass over `width` tokens may look at slots past its last token, which it must mask."""
        return self.bucket > 1 and width <= self._slack + 1

    def slots(self, width: int) -> Tensor:
        """Slots that a pass over `width` tokens writes: `[1, width]` for equal cursors, else `[batch, width]`."""
        if self.uniform:
            return torch.arange(self.lengths[0], self.lengths[0] + width, device=self.device)[None]
        # Pinned and not waited for: the upload must not cost the round a synchronisation.
        cursor = torch.tensor(self.lengths, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)
        return cursor[:, None] + torch.arange(width, device=self.device)

    def right_aligned(self, width: int) -> Tensor:
        """Which slot stands where once rows are aligned on the right, `[batch, visible]`; negative: padding."""
        last = self.slots(width)[:, -1:]
        return last + 1 - self.visible(width) + torch.arange(self.visible(width), device=self.device)
