"""The control that a draft length and a number of nodes name, as options, files and arms of a comparison have them."""

from __future__ import annotations

from selfspec.control.controller import Control, check_nodes
from selfspec.control.cost_aware import CostAware
from selfspec.control.fixed import FixedLength


def control_of(draft_length: int | None, nodes: int | None) -> Control:
    """Return the control of a draft length, of trees of that many nodes, of both, or by default of neither.

    Args:
        draft_length: tokens to draft each round, of a tree levels; None: as many as pay.
        nodes: the most tokens of a draft, siblings included; None: drafts are chains.

    Raises:
        DraftConfigError: one is out of range, or there are fewer nodes than levels.
    """
    if draft_length is not None:
        return FixedLength(draft_length, nodes)
    if nodes is None:
        return CostAware()
    check_nodes(nodes, 1)
    return CostAware(min(CostAware.longest, nodes), nodes=nodes)
