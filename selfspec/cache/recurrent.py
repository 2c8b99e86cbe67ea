"""Layers that no cursor can roll back: recurrent and convolutional state, kept after each node of a round's block.

The state of such a layer sums up all that it has read, so rolling back means restoring a copy. Copies are small, one
per node of a round. A pass over a block runs these layers one token at a time: each starts from its parent's state and
leaves a copy. Besides, several architectures start a pass over several tokens from an empty state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from selfspec.cache.cursors import Cursors
from selfspec.device import to_device


@dataclass(frozen=True)
class Snapshot:
    """Holds the state of one layer after some token.

    Attributes:
        conv: the last inputs of each convolution, `[batch, channels, kernel]`.
        recurrent: the state of each recurrence, `[batch, ...]`.
    """

    conv: dict[int, Tensor]
    recurrent: dict[int, Tensor]

    @classmethod
    def of(cls, layer: LinearAttentionCacheLayerMixin) -> Snapshot:
        """Return the current states of a layer, not copied."""
        held = (layer.conv_states, layer.recurrent_states)
        return cls(*({index: state for index, state in each.items() if state is not None} for each in held))

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in [*self.conv.values(), *self.recurrent.values()])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Snapshot:
        """Return a snapshot with `change` applied to every state."""
        return Snapshot(
            {index: change(state) for index, state in self.conv.items()},
            {index: change(state) for index, state in self.recurrent.items()},
        )


class RecurrentLayer(LinearAttentionLayer):
    """Holds the states of one layer: the working state of `transformers`, and one snapshot for each node.

    Args:
        cursors: where each row ends, and the block that is open there.
        number_of_states: number of convolutions or recurrences of the layer.
    """

    def __init__(self, cursors: Cursors, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        self._cursors = cursors
        # After all committed tokens; None before the first.
        self._settled: Snapshot | None = None
        # After each node of the open block that was read.
        self._after: dict[int, Snapshot] = {}
        self._most = 0

    @property
    def state_bytes(self) -> int:
        """The most bytes that snapshots have taken so far."""
        return self._most

    @property
    def settled(self) -> Snapshot:
        """The state after all committed tokens; empty before the first."""
        return self._settled or Snapshot({}, {})

    def enter(self, node: int) -> None:
        """Make a copy of the parent's state the working state, which the pass may overwrite."""
        snapshot = self._settled if node < 0 else self._after[self._cursors.parent(node)]
        copied = Snapshot({}, {}) if snapshot is None else snapshot.mapped(torch.clone)
        for index in range(self.number_of_states):
            self.conv_states[index] = copied.conv.get(index)
            self.recurrent_states[index] = copied.recurrent.get(index)
            self.is_conv_states_initialized[index] = index in copied.conv
            self.is_recurrent_states_initialized[index] = index in copied.recurrent
            self.has_previous_state[index] = snapshot is not None

    def record(self, node: int) -> None:
        """Keep the working state as the state after a node."""
        self._after[node] = Snapshot.of(self)
        self._most = max(self._most, sum(each.nbytes for each in (self.settled, *self._after.values())))

    def nodes(self, width: int) -> range:
        """Return the nodes of the current pass."""
        return range(self._cursors.first, self._cursors.first + width)

    def begin_with(self, snapshot: Snapshot) -> None:
        """Resume from the state of an earlier generation."""
        self._settled = snapshot

    def take_states(self, other: RecurrentLayer, row: int) -> None:
        """Copy the states of one row of another cache's layer into the only row here."""
        if other._settled is not None:
            self._settled = other._settled.mapped(lambda state: state[row : row + 1].clone())

    def settle(self, nodes: Sequence[int | None]) -> None:
        """Commit each row's state after its node, and drop all other states.

        Args:
            nodes: for each row, the last node that it commits; None: it commits nothing.

        Raises:
            KeyError: no pass has read the node.
        """
        # A layer may have read nothing yet: keys and values of a past are loaded before states.
        if (self._settled or self._after) and any(node is not None for node in nodes):
            # A row that has read nothing has a state of zeros.
            before = self._settled or next(iter(self._after.values())).mapped(torch.zeros_like)
            self._settled = _rows_of([before if node is None else self._after[node] for node in nodes])
        self._after = {}

    def narrow_states(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in the order given."""
        if self._settled is not None:
            self._settled = self._settled.mapped(lambda state: state[to_device(rows, state.device)])

    def join_states(self, other: RecurrentLayer, own: int, others: int) -> None:
        """Append the states of another cache's rows. Rows that have read nothing have states of zeros.

        Args:
            other: the same layer of the other cache.
            own: number of rows here.
            others: number of rows there.
        """
        if self._settled is None and other._settled is None:
            return
        like = self._settled or other._settled
        assert like is not None

        def nothing(rows: int) -> Snapshot:
            return like.mapped(lambda state: state.new_zeros(rows, *state.shape[1:]))

        first, second = self._settled or nothing(own), other._settled or nothing(others)

        def both(states: Callable[[Snapshot], dict[int, Tensor]]) -> dict[int, Tensor]:
            return {index: torch.cat([states(first)[index], states(second)[index]]) for index in states(like)}

        self._settled = Snapshot(both(lambda snapshot: snapshot.conv), both(lambda snapshot: snapshot.recurrent))

    def reset(self) -> None:
        super().reset()
        self._settled, self._after = None, {}


def _rows_of(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Take each row's state from the snapshot given for it."""
    first = snapshots[0]
    if all(snapshot is first for snapshot in snapshots):
        return first

    def each_row(states: Callable[[Snapshot], dict[int, Tensor]]) -> dict[int, Tensor]:
        rows = list(enumerate(snapshots))
        return {index: torch.stack([states(each)[index][row] for row, each in rows]) for index in states(first)}

    return Snapshot(each_row(lambda snapshot: snapshot.conv), each_row(lambda snapshot: snapshot.recurrent))
