"""Cursors: where each row of the cache ends, and so which slots a pass writes and sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.device import to_device


@dataclass(frozen=True)
class OpenBlock:
    """Holds an open block as tensors whose shapes depend on the number of nodes alone, so a recording serves many."""

    start: Tensor  # slot of the last committed token, `[batch, 1]`, or `[1, 1]` where all cursors are equal
    depths: Tensor  # 0 for the last committed token, then the depth of each node, `[nodes + 1]`
    sees: Tensor  # True where a token (row) sees another (column): itself and its ancestors, `[nodes + 1, nodes + 1]`

    @staticmethod
    def tables(tree: Tree, nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `depths` and `sees` of a tree; nodes behind it, up to `nodes`, see committed tokens and themselves."""
        sees = torch.eye(nodes + 1, dtype=torch.bool)
        sees[:, 0] = True
        for node, path in enumerate(tree.paths):
            sees[node + 1, torch.tensor(path) + 1] = True
        depths = (0, *tree.depths, *[1] * (nodes - len(tree)))
        return to_device(depths, device), to_device(sees, device)

    @property
    def nodes(self) -> int:
        """Number of nodes of the tree."""
        return self.depths.shape[0] - 1

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three tensors, in the order of the attributes."""
        return self.start, self.depths, self.sees

    def positions(self, slots: Tensor) -> Tensor:
        """Return the position of each slot, `[batch or 1, slots]`: before the block, slot i has position i."""
        place = slots - self.start
        inside = self.start + self.depths[place.clamp(0, self.nodes)]
        return torch.where(place < 0, slots, inside)

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether tokens of the block in slots `queries` see slots `keys`, `[batch or 1, queries, keys]`."""
        query, key = (queries - self.start)[:, :, None], (keys - self.start)[:, None, :]
        own = self.sees[query, key.clamp(0, self.nodes)] & (key <= self.nodes)
        return (key < 0) | own


WIDEST_ROUND = 16
"""Tokens of each row that a pass of a round may read, even with less slack: programs read more than they need."""

BUCKET = 256
"""Captured passes look at a multiple of this number of slots."""

MOST_GRAPHS = 32
"""The most graphs of one kind of pass: it has one for each bucket of slots and each cache."""

_SMALLEST_ROOM = 64
# Numbers of nodes of trees that captured passes read.
_TREES = (7, 15, 31, 63)


class Cursors:
    """Keeps where the committed tokens of each row end, and what a pass reads after them.

    A pass reads `width` nodes of the block, from node `first` on. Node -1, the last committed token, lies in the slot
    at the cursor; node i lies `i + 1` slots further. `seq_lens` are the cursors.
    """

    def __init__(
        self, batch: int, limit: int, slack: int, device: torch.device, aligned: Literal["left", "right"], bucket: int
    ) -> None:
        self.seq_lens = [0] * batch
        self.offsets = [0] * batch  # position id minus the number of a token in the text, for each row
        self.held = batch  # number of rows with storage, now or from the next pass on; those of `seq_lens` come first
        self.tree: Tree | None = None  # the tree of the open block; None: it is a chain of any length
        self.first = -1
        self.read = 0  # how many tokens of the block passes have read
        self.limit = limit  # the most tokens a row may come to hold
        self.device = device  # where positions are made
        self.aligned = aligned  # the side on which passes find the rows of a ragged batch aligned
        self.bucket = bucket  # passes of a round look at a multiple of this number of slots, or at all slots
        self.slack = slack  # the most nodes of a draft
        # The device whose copies of slots of the host may be under way; None: all are done.
        self.copying: torch.device | None = None
        self.room = self._whole(min(_SMALLEST_ROOM, limit))  # committed tokens that a row has slots for
        self._tables: dict[tuple[Tree, int], tuple[Tensor, Tensor]] = {}
        # Ends of rows when slots were last asked for, and the slots returned for each width and first node of a pass.
        self._asked: tuple[list[int], dict[tuple[int, int], Tensor]] = ([], {})
        self._counted = torch.empty(0, dtype=torch.long, device=device)

    @property
    def capacity(self) -> int:
        """Slots a row has, or will have with the next pass."""
        return self.room + self.slack

    def narrow(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in the order given."""
        self.seq_lens = [self.seq_lens[row] for row in rows]
        self.offsets = [self.offsets[row] for row in rows]

    @property
    def uniform(self) -> bool:
        """True if all cursors are equal."""
        return len(set(self.seq_lens)) == 1

    def parent(self, node: int) -> int:
        """Return the parent of a node; nodes count from 0."""
        return node - 1 if self.tree is None else self.tree.parents[node]

    def move(self, counts: Sequence[int]) -> None:
        """Advance each cursor by its number of tokens, and close the block."""
        self.seq_lens = [length + count for length, count in zip(self.seq_lens, counts, strict=True)]
        self.tree, self.read = None, 0

    def reserve(self, committed: int) -> None:
        """Make room for `committed` tokens per row and a draft after them: it doubles, up to the limit."""
        while self.room < min(committed, self.limit):
            self.room = self._whole(min(2 * self.room, self.limit))

    def _whole(self, room: int) -> int:
        """Round room up to whole buckets of slots, so that passes over caches of many lengths have one shape."""
        return -(-(room + self.slack) // self.bucket) * self.bucket - self.slack

    def visible(self, width: int, first: int) -> int:
        """Return the number of slots, from the first, that a pass looks at."""
        needed = max(self.seq_lens) + first + 1 + width
        if not self.padded(width):
            return needed
        return min(-(-needed // self.bucket) * self.bucket, self.capacity)

    def padded(self, width: int) -> bool:
        """Return whether a pass over `width` tokens may look at slots past its last token, which it must mask."""
        return self.bucket > 1 and width <= max(self.slack + 1, WIDEST_ROUND)

    def slots(self, width: int, first: int) -> Tensor:
        """Return the slots that a pass writes: `[1, width]` for equal cursors, else `[batch, width]`."""
        if self._asked[0] != self.seq_lens:
            self._asked = (list(self.seq_lens), {})
        # Every layer asks, and the answer changes only between rounds.
        known = self._asked[1]
        if (width, first) not in known:
            starts = [length + first + 1 for length in self.seq_lens]
            known[width, first] = (
                self.numbers(starts[0], starts[0] + width)[None]
                if self.uniform
                else to_device(torch.tensor(starts)[:, None] + torch.arange(width), self.device)
            )
        return known[width, first]

    def numbers(self, start: int, end: int) -> Tensor:
        """Return the numbers from `start` to before `end`, a view of a table that every pass shares."""
        if end > self._counted.shape[0]:
            self._counted = torch.arange(max(end, self.capacity), device=self.device)
        return self._counted[start:end]

    @property
    def shifted_alike(self) -> bool:
        """True if all rows have the same offset."""
        return len(set(self.offsets)) == 1

    def positions(self, width: int, first: int = -1) -> Tensor:
        """Return the text position of each node of a pass, `[batch or 1, width]`.

        Scrap past the limit gets the last position: a table of learned positions has no more.
        """
        slots, block = self.slots(width, first), self.block(width, first)
        # A view: recorded passes tell their tensors apart by identity.
        positions = slots[:] if block is None else block.positions(slots)
        return positions if max(self.seq_lens) + first + width < self.limit else positions.clamp(max=self.limit - 1)

    def position_ids(self, width: int, first: int = -1) -> Tensor:
        """Return the position ids that the model takes for a pass, `[batch or 1, width]`."""
        positions = self.positions(width, first)
        if not any(self.offsets):
            return positions
        offsets = self.offsets[:1] if self.shifted_alike else self.offsets
        return positions + to_device(offsets, self.device)[:, None]

    def block(self, width: int, first: int) -> OpenBlock | None:
        """Return the open block; None if a token of the pass sees all slots before its own."""
        # A tree begins as a chain; a pass that reads no further runs as over a chain.
        if self.tree is None or self.tree.is_chain or first + width <= self.tree.trunk:
            return None
        table = self.tree, self.nodes(width, first)
        if table not in self._tables:
            self._tables[table] = OpenBlock.tables(*table, self.device)
        return OpenBlock(self.slots(1, -1), *self._tables[table])

    def nodes(self, width: int, first: int) -> int:
        """Return the number of nodes that a pass finds in the open tree, and behind it: few numbers for captures."""
        nodes = max(0 if self.tree is None else len(self.tree), first + width)
        return nodes if self.bucket == 1 else next((size for size in _TREES if size >= nodes), nodes)

    def right_aligned(self, width: int, first: int) -> Tensor:
        """Return the slot at each place once rows are aligned on the right, `[batch, visible]`; negative: padding."""
        last, visible = self.slots(width, first)[:, -1:], self.visible(width, first)
        return last + 1 - visible + self.numbers(0, visible)
