"""Models whose layers are streamed, from the disk or by a stand-in for a device that copies beside what it computes.

What makes streams hard to use is true of it too: a copy comes as late as it may, and until then nonsense
lies where it goes; and nothing may be copied to where something may still be computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from selfspec.placement.drafts import placement_of
from selfspec.placement.place import default_draft, place
from selfspec.placement.plan import Bandwidth, Memory, Plan
from selfspec.placement.survey import survey
from selfspec.placement.weight_source import FromDisk, FromHost, WeightSource
from selfspec.placement.weight_stream import DeviceCopies


@dataclass
class _Copy:
    to: Tensor
    source: Tensor
    done: bool = False


class StandInCopies(DeviceCopies):
    """Copies late, and checks that what reads the memory was waited for."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.copied = 0
        self.locked: list[int] = []
        self._now = 0
        self._waited = 0
        # When something was allowed last to read what lies at an address.
        self._read: dict[int, int] = {}

    def host_memory(self, size: int) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8)
        self.locked.append(memory.data_ptr())
        return memory

    def release(self, memory: Tensor) -> None:
        self.locked.remove(memory.data_ptr())

    def device_memory(self, size: int) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8)
        # Whoever had it before may read it now.
        self._read[memory.data_ptr()] = self._tick()
        return memory

    def copy(self, to: Tensor, source: Tensor, after: Sequence[Any]) -> Any:
        self._waited = max([self._waited, *after])
        assert self._waited > self._read[to.data_ptr()], "copied to where something may still be computing"
        to.view(torch.uint8).fill_(0xFF)
        return _Copy(to, source)

    def wait_for(self, copied: Any) -> None:
        self._do(copied)
        self._read[copied.to.data_ptr()] = self._tick()

    def computed(self) -> Any:
        return self._tick()

    def finish(self) -> None:
        self._waited = self._tick()

    def device_bytes(self) -> int:
        return 2**50

    def _do(self, copied: _Copy) -> None:
        if not copied.done:
            copied.done = True
            copied.to.copy_(copied.source)
            self.copied += copied.to.nbytes

    def _tick(self) -> int:
        self._now += 1
        return self._now


PROMPTS = torch.tensor([[3, 7, 11, 2, 5, 9], [0, 0, 4, 8, 12, 6]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])


def plan(resident: int, format: str | None = None, partly: int = 0) -> Plan:
    """Plan five layers, the last of which is the head, so that some stay and some stay in part."""
    drafting, step = (None, None) if format is None else (4.0, 0.05)
    part = "upper" if partly else None
    memory = Memory(0, 0, (1,) * 5, 1, {}, 0, 0, parts={"upper": (0,) * 5})
    return Plan(
        memory,
        resident,
        format,
        partly,
        part,
        bandwidth=Bandwidth(10e9, 1e9),
        plain=1.0,
        drafting=drafting,
        draft_step=step,
    )


def streamed(
    folder: Path,
    model: PreTrainedModel,
    source: WeightSource | None = None,
    resident: int = 1,
    format: str | None = "int4",
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Save a model, and load it so that all but some layers are streamed."""
    model.save_pretrained(folder)
    return place(survey(str(folder), dtype, 128, source or FromDisk()), plan(resident, format))


def wrapped(model: PreTrainedModel) -> selfspec.SelfSpeculative:
    """Wrap a streamed model with the draft of its plan."""
    placement: Any = placement_of(model)
    return selfspec.wrap(model, default_draft(placement.plan), runtime=selfspec.runtime.Eager())


def greedy(spec: selfspec.SelfSpeculative, new: int = 8) -> Tensor:
    return spec.generate(PROMPTS, MASK, max_new_tokens=new, do_sample=False).sequences


def stand_in_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let budgets be those of a device: weights are streamed to the CPU as they would be to a GPU."""
    monkeypatch.setattr("selfspec.api.source_for", lambda _: FromHost(StandInCopies()))
