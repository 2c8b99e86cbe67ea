"""What a draft step from each exit costs, by the weights it reads."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.adapter import Adapter
from selfspec.anatomy import describe
from selfspec.costs import Costs
from selfspec.draft_cost import exits_reading
from selfspec.train.exit_heads import ExitHeads


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
    anatomy = describe(base, adapter)
    costs = {}
    for choice in exits_reading(anatomy, anatomy.vocabulary if tokens is None else len(tokens)):
        if heads is None:
            costs[choice.layer] = Costs(choice.cost_ratio)
        elif str(choice.layer) in heads.exits:
            own = sum(weight.numel() for weight in heads.exits[str(choice.layer)].parameters())
            read = choice.bytes_read + own * base.dtype.itemsize
            costs[choice.layer] = Costs(read / anatomy.target_bytes_read)
    return costs
