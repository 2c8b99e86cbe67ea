"""The process that measures the peak memory of one arm: `python -m selfspec.tools.bench.memory_probe`, job on stdin."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from selfspec.kernels.packed import pack
from selfspec.measure.peak_memory import peak_memory, resident_bytes
from selfspec.model.fingerprint import plain
from selfspec.tools.bench.arm import ArmSpec
from selfspec.tools.bench.arms import make_arm
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.memory import Memory, MemoryJob

# Tokens enough for every kind of pass.
_FEW = 16


def probe(job: MemoryJob) -> Memory | None:
    """Load the model, decode a few tokens so that all code is loaded, and then measure a whole call."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(job.threads)
    device = torch.device(job.device)
    before = _in_use(device)
    dtype = getattr(torch, job.dtype)
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=dtype).to(device).eval()
    spec = ArmSpec.from_dict(job.arm)
    if spec.packed:
        pack(model)
    # Weights may be mapped from their file, and are not in memory before they are read.
    for weight in model.parameters():
        plain(weight).sum()
    weights = _in_use(device) - before
    arm = make_arm(spec, model)
    prompts = torch.tensor(job.prompts, device=device)
    cell = Cell.from_dict(job.cell)
    arm.decode(prompts[:, :_FEW], replace(cell, max_new_tokens=_FEW), seed=0)
    loaded = _in_use(device)
    growth = peak_memory(lambda: arm.decode(prompts, cell, seed=0), device)
    if growth is None:
        return None
    return Memory(weights, loaded - before + growth, "torch" if device.type == "cuda" else "system")


def _in_use(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes() or 0


if __name__ == "__main__":
    found = probe(MemoryJob(**json.load(sys.stdin)))
    print(json.dumps(None if found is None else asdict(found)))
