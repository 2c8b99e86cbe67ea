"""Heads that go on from their own states, as they learn: all pairs of a text at once, a drafted token at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from selfspec.compat import over_cache
from selfspec.draft.heads.head import Fusion
from selfspec.model.features import FeatureTap
from selfspec.model.registry import find_adapter
from selfspec.tools.train.heads.lesson import DraftHeadModule, Seen


class UnrolledModule(DraftHeadModule):
    """The modules that the drafter itself runs, over whole texts.

    Args:
        fusion: comes before the layers.
        layers: see `Head`.
        output: gives logits of normed states, `[pairs, hidden]`; in a tuple where it does not learn.
        recycled: which of its own states stands for a token that it drafted.
    """

    def __init__(
        self,
        fusion: Fusion,
        layers: PreTrainedModel,
        output: Callable[[Tensor], Tensor],
        recycled: Literal["last", "normed"],
    ) -> None:
        super().__init__()
        self.fusion = fusion
        self.layers = layers
        self._output = (output,)
        self._recycled: Literal["last", "normed"] = recycled

    def taught(self, step: int, depth: int) -> int:
        # One after another: each takes as long as the first, and is worth nothing where one before it is wrong.
        return 1 + step % depth

    def forward(self, seen: Seen, steps: int) -> list[Tensor]:
        adapter = find_adapter(self.layers)
        base = adapter.base(self.layers)
        tap = FeatureTap(self.layers, adapter, base, (self._recycled,))
        (output,), state, cache, found = self._output, self.fusion.state(seen.features), DynamicCache(), []
        width = state.shape[1]
        positions = torch.arange(width, device=state.device)[None]
        for step in range(steps):
            # Of the last token before a draft the state is the target's, of drafted ones its own.
            normed = tap.module.get_submodule(base)(
                inputs_embeds=self.fusion.inputs(seen.embedded, state),
                attention_mask=_unrolled(width, step, state),
                position_ids=positions,
                **over_cache(self.layers, cache),
            )[0]
            found.append(output(normed[seen.reached(step)]))
            state = pad(tap.take()[self._recycled][:, :-1], (0, 0, 1, 0))
        return found


def _unrolled(width: int, step: int, like: Tensor) -> Tensor:
    """What pairs of a step see of those of all steps so far, `[1, 1, width, (step + 1) * width]`, as it is added.

    The draft that a pair is in began `step` pairs before it: until there it sees the target's, then its own.
    """
    seen = torch.ones(width, width, dtype=torch.bool, device=like.device)
    parts = [seen.tril(-step)] + [seen.tril(each - step) & seen.triu(each - step) for each in range(1, step + 1)]
    # Pairs that no draft of this step ends at see themselves, so that what they give is a number.
    parts[-1] = parts[-1] | torch.eye(width, dtype=torch.bool, device=like.device)
    mask = torch.zeros(width, len(parts) * width, dtype=like.dtype, device=like.device)
    return mask.masked_fill(~torch.cat(parts, 1), torch.finfo(like.dtype).min)[None, None]
