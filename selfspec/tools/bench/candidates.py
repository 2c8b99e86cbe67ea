"""What several candidates for one place are worth to a draft of trees, and would be to the best rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import draft_name
from selfspec.measure.acceptance import forced_logits
from selfspec.measure.candidates import Candidates, candidates_at_one_place, distributions
from selfspec.measure.own_text import Continuation
from selfspec.model.registry import find_adapter
from selfspec.tools.bench.arms import OwnArm
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.measure import ArmRun

# Texts, and places of each: the optimum takes a second for these.
_TEXTS, _PLACES = 8, 8


def candidates_of(model: PreTrainedModel, cell: Cell, measured: ArmRun, prompts: Sequence[Tensor]) -> list[Candidates]:
    """Compare rules at places of the texts that an arm wrote; none for arms that draw no trees from a model.

    Args:
        model: that it ran.
        cell: its conditions.
        measured: the arm's calls.
        prompts: of the calls, `[batch, context]` each.
    """
    arm, draft = measured.arm, None
    if isinstance(arm, OwnArm) and arm.spec.nodes is not None and measured.calls:
        draft = arm.drafter(cell)
    if not isinstance(draft, LayerPathDrafter) or not cell.temperature:
        return []
    texts = []
    for batch, call in zip(prompts, measured.calls[0], strict=True):
        for prompt, row in zip(batch, call.rows, strict=True):
            ids = torch.cat([prompt, torch.tensor(row, device=prompt.device)])[None]
            texts.append(Continuation(ids, len(prompt)))
    chosen = texts[:: -(-len(texts) // _TEXTS)]
    found = []
    for each in forced_logits(model, find_adapter(model), {draft_name(draft): draft}, chosen):
        step = -(-len(each.target) // _PLACES)
        pair = distributions([each.target[::step].cpu(), each.draft[::step].cpu()], cell.temperature)
        found.append((pair[0], pair[1]))
    return candidates_at_one_place(found)
