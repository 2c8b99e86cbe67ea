"""What a draft step from each exit costs, by the weights it reads."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.control.costs import Costs, share_read
from selfspec.draft import EarlyExit
from selfspec.model.adapter import Adapter
from selfspec.model.early_head import DraftHead
from selfspec.tools.train.exit_heads import ExitHeads


def exit_costs(
    base: PreTrainedModel, adapter: Adapter, heads: ExitHeads | None, tokens: Tensor | None
) -> dict[int, Costs]:
    """What a draft step from each exit costs by the weights it reads, with a head of its own and fewer rows to read.

    Args:
        base: the stock model.
        adapter: where its layers are.
        heads: exit heads; None: plain exits, all of them.
        tokens: ids that can be drafted; None: all.
    """
    depth = len(adapter.decoder_layers(base))
    exits = range(1, depth) if heads is None else sorted(map(int, heads.exits))
    costs = {}
    for exit_layer in exits:
        head = DraftHead(None if heads is None else heads.exits[str(exit_layer)], tokens)
        costs[exit_layer] = Costs(share_read(base, adapter, EarlyExit(exit_layer).path(depth), head))
    return costs
