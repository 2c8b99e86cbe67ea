"""Measure the peak memory of each arm, in a process of its own."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from selfspec.device import backend, on_host
from selfspec.measure.timing import peak_memory
from selfspec.model.tensor_parallel import whole
from selfspec.process import resident_bytes
from selfspec.tools.lab.arms import ArmSpec, Cell, Prompts, make_arm

# Tokens enough for every kind of pass.
_FEW = 16


@dataclass(frozen=True)
class PeakMemory:
    """Memory of one call, in bytes: of the loaded weights, and at the peak, the weights included.

    Torch counts it, or the system: the resident set without Python and its libraries.
    """

    weights: int
    peak: int


@dataclass(frozen=True)
class _Job:
    """The work of the other process, and its device."""

    arm: ArmSpec
    cell: Cell
    prompts: Prompts
    place: str
    dtype: torch.dtype
    device: torch.device
    threads: int


def measure_memory(arm: ArmSpec, cell: Cell, prompts: Prompts, place: str, dtype: torch.dtype) -> PeakMemory | None:
    """Let a new process load the model and decode once, on the device of the prompts; None: the system cannot tell."""
    there = Prompts(prompts.ids.cpu(), prompts.mask.cpu())
    job = _Job(arm, cell, there, place, dtype, prompts.ids.device, torch.get_num_threads())
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        try:
            return process.submit(_measure, job).result()
        except Exception as error:
            raise RuntimeError(f"memory of {arm.name} could not be measured: {error}") from error


def _measure(job: _Job) -> PeakMemory | None:
    """Load the model, decode a few tokens so that all code is loaded, and then measure a whole call."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(job.threads)
    before = _in_use(job.device)
    model = AutoModelForCausalLM.from_pretrained(job.place, dtype=job.dtype).to(job.device).eval()
    # Weights may be mapped from their file, and are not in memory before they are read.
    for weight in model.parameters():
        whole(weight).sum()
    weights = _in_use(job.device) - before
    arm, prompts = make_arm(job.arm, model), Prompts(job.prompts.ids.to(job.device), job.prompts.mask.to(job.device))
    few = Prompts.of_one_length(prompts.ids[:, -_FEW:])
    arm.decode(few, replace(job.cell, max_new_tokens=_FEW), seed=0)
    loaded = _in_use(job.device)
    growth = peak_memory(lambda: arm.decode(prompts, job.cell, seed=0), job.device)
    if growth is None:
        return None
    return PeakMemory(weights, loaded - before + growth)


def _in_use(device: torch.device) -> int:
    allocated: int = backend(device).memory_allocated(device) if _counts(device) else resident_bytes() or 0
    return allocated


def _counts(device: torch.device) -> bool:
    """Return whether torch counts the memory of a device."""
    return not on_host(device) and hasattr(backend(device), "memory_allocated")
