"""What is measured at a time: one workload at one temperature, batch size and prompt length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from selfspec.errors import PromptError
from selfspec.measure.prompts import Workload
from selfspec.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class Cell:
    """One combination of conditions. All arms are measured in it, in turns.

    Attributes:
        temperature: 0 decodes greedily.
        batch: rows of a call.
        context: tokens of every prompt.
        max_new_tokens: tokens of every text; nothing ends one sooner, so that all arms do the same work.
    """

    workload: str
    temperature: float
    batch: int
    context: int
    max_new_tokens: int

    @property
    def title(self) -> str:
        """The conditions in words."""
        return (
            f"{self.workload}, temperature {self.temperature:g}, batch {self.batch}, {self.context} tokens of prompt, "
            f"{self.max_new_tokens} new"
        )

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `generate`, for every arm the same."""
        sampling = {"temperature": self.temperature, "top_k": 0} if self.sampled else {}
        return {
            "do_sample": self.sampled,
            "max_new_tokens": self.max_new_tokens,
            "eos_token_id": None,
            "pad_token_id": 0,
            **sampling,
        }


def with_prompts(
    cells: Sequence[Cell], workloads: Mapping[str, Workload], number: int, checkpoint: Checkpoint
) -> dict[Cell, list[Tensor]]:
    """Cells with the prompts of each call, `[batch, context]` on the model's device; `number` of each workload."""
    limit = getattr(checkpoint.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max(cells, key=lambda cell: cell.context + cell.max_new_tokens)
    if limit is not None and longest.context + longest.max_new_tokens > limit:
        raise PromptError(
            f"a prompt of {longest.context} and {longest.max_new_tokens} new tokens exceed the model's context of "
            f"{limit}; give a smaller --context or --max-new-tokens"
        )
    device, tokenizer = checkpoint.model.device, checkpoint.tokenizer
    made = {cell: workloads[cell.workload].prompts(tokenizer, number, cell.batch, cell.context) for cell in cells}
    return {cell: [prompts.to(device) for prompts in calls] for cell, calls in made.items()}
