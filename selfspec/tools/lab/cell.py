"""What is measured at a time: one workload at one temperature, batch size and prompt length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from selfspec.measure.prompts import PromptWriter, Workload, check_context
from selfspec.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class Cell:
    """One combination of conditions. All arms are measured in it, in turns.

    Attributes:
        temperature: 0 decodes greedily.
        batch: rows of a call.
        context: tokens of every prompt. Nothing then ends a text sooner, so that all arms do the same work. None:
            prompts are whole, and texts end where the model ends them.
        max_new_tokens: the most tokens of a text.
        chat: whether prompts are written by the chat template.
    """

    workload: str
    temperature: float
    batch: int
    context: int | None
    max_new_tokens: int
    chat: bool = False

    @property
    def title(self) -> str:
        """The conditions in words."""
        prompts = "whole prompts" if self.context is None else f"{self.context} tokens of prompt"
        chat = " as chat" if self.chat else ""
        return f"{self.workload}, {self.decoding}, batch {self.batch}, {prompts}{chat}, {self.max_new_tokens} new"

    @property
    def decoding(self) -> str:
        """How tokens are chosen, in words."""
        return f"temperature {self.temperature:g}" if self.sampled else "greedy"

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `generate`, for every arm the same."""
        sampling = {"temperature": self.temperature, "top_k": 0} if self.sampled else {}
        endless = {} if self.context is None else {"eos_token_id": None}
        return {
            "do_sample": self.sampled,
            "max_new_tokens": self.max_new_tokens,
            "pad_token_id": 0,
            **endless,
            **sampling,
        }


@dataclass(frozen=True)
class Prompts:
    """The prompts of one call, left-padded, `[batch, tokens]` on the model's device.

    Attributes:
        mask: 1 where there is text.
    """

    ids: Tensor
    mask: Tensor

    @classmethod
    def of_one_length(cls, ids: Tensor) -> Prompts:
        """Take prompts without padding."""
        return cls(ids, torch.ones_like(ids))

    @classmethod
    def padded(cls, prompts: Sequence[Tensor]) -> Prompts:
        """Pad prompts of any lengths, `[1, tokens]` each."""
        rows = [prompt[0] for prompt in prompts]
        ids, mask = (
            pad_sequence(part, batch_first=True, padding_side="left")
            for part in (rows, [torch.ones_like(row) for row in rows])
        )
        return cls(ids, mask)

    @property
    def rows(self) -> list[list[int]]:
        """Each prompt without its padding."""
        return [row[at.bool()].tolist() for row, at in zip(self.ids, self.mask, strict=True)]


def with_prompts(
    cells: Sequence[Cell], workloads: Mapping[str, Workload], number: int, checkpoint: Checkpoint
) -> dict[Cell, list[Prompts]]:
    """Cells with the prompts of each call; `number` of each workload.

    Raises:
        PromptError: a prompt and its text exceed the model's context, or there is no chat template, where one is asked
            for.
    """
    model, made = checkpoint.model, dict[Cell, list[Prompts]]()
    writers = {
        key: PromptWriter(checkpoint, *key) for key in dict.fromkeys((cell.chat, cell.max_new_tokens) for cell in cells)
    }
    for cell in cells:
        workload = workloads[cell.workload]
        if cell.context is None:
            prompts = workload.whole_prompts(writers[cell.chat, cell.max_new_tokens], max(number, cell.batch))
            calls = _calls(cell, prompts)
        else:
            made_alike = workload.prompts(checkpoint.tokenizer, number, cell.batch, cell.context)
            calls = [*map(Prompts.of_one_length, made_alike)]
        check_context(model, [call.ids for call in calls], cell.max_new_tokens)
        made[cell] = [Prompts(call.ids.to(model.device), call.mask.to(model.device)) for call in calls]
    return made


def _calls(cell: Cell, prompts: list[Tensor]) -> list[Prompts]:
    # Where there are too few for a batch they come again.
    prompts = [prompts[row % len(prompts)] for row in range(max(len(prompts), cell.batch))]
    starts = range(0, len(prompts) - cell.batch + 1, cell.batch)
    return [Prompts.padded(prompts[start : start + cell.batch]) for start in starts]
