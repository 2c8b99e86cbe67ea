"""Peak memory of an arm, measured in a separate process, so that no arm hides behind another."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from selfspec.measure.peak_memory import peak_memory
from selfspec.model.fingerprint import plain
from selfspec.placement.resident import resident_bytes
from selfspec.runtime.packed import pack
from selfspec.tools.bench.arms import ArmSpec, make_arm
from selfspec.tools.bench.cell import Cell

# Tokens enough for every kind of pass.
_FEW = 16


@dataclass(frozen=True)
class Memory:
    """What one call took, in bytes.

    On CUDA torch counts what it allocated; on a CPU the operating system counts the resident set, in pages, Python and
    its libraries left out.

    Attributes:
        weights: what the loaded model takes.
        peak: the most there was at any time of the call, the weights included.
        counted_by: who counted: "torch" or "system".
    """

    weights: int
    peak: int
    counted_by: str

    @property
    def growth(self) -> int:
        """What the call took above the weights."""
        return self.peak - self.weights


def measure_memory(arm: ArmSpec, cell: Cell, prompts: Tensor, place: str, dtype: torch.dtype) -> Memory | None:
    """Let a new process load the model and decode once, on the device of the prompts.

    Returns:
        What it took; None where the system does not tell.
    """
    job = (arm, cell, prompts.tolist(), place, dtype, prompts.device, torch.get_num_threads())
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        try:
            return process.submit(_measure, *job).result()
        except Exception as error:
            raise RuntimeError(f"memory of {arm.name} could not be measured: {error}") from error


def _measure(
    spec: ArmSpec, cell: Cell, ids: list[list[int]], place: str, dtype: torch.dtype, device: torch.device, threads: int
) -> Memory | None:
    """Load the model, decode a few tokens so that all code is loaded, and then measure a whole call."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    before = _in_use(device)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype).to(device).eval()
    if spec.packed:
        pack(model)
    # Weights may be mapped from their file, and are not in memory before they are read.
    for weight in model.parameters():
        plain(weight).sum()
    weights = _in_use(device) - before
    arm, prompts = make_arm(spec, model), torch.tensor(ids, device=device)
    arm.decode(prompts[:, :_FEW], replace(cell, max_new_tokens=_FEW), seed=0)
    loaded = _in_use(device)
    growth = peak_memory(lambda: arm.decode(prompts, cell, seed=0), device)
    if growth is None:
        return None
    return Memory(weights, loaded - before + growth, "torch" if device.type == "cuda" else "system")


def _in_use(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes() or 0
