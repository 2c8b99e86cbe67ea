"""Peak memory of an arm, measured in a process of its own, so that no arm hides behind another."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from selfspec.tools.bench.arm import ArmSpec
from selfspec.tools.bench.cell import Cell


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


@dataclass(frozen=True)
class MemoryJob:
    """What the process is told.

    Attributes:
        folder: of the checkpoint, or its name on the hub.
        dtype: what to compute in.
        device: where.
        threads: CPU threads of torch.
        arm: which.
        cell: how to decode.
        prompts: token ids, `[batch][prompt]`.
    """

    folder: str
    dtype: str
    device: str
    threads: int
    arm: dict[str, Any]
    cell: dict[str, Any]
    prompts: list[list[int]]


def measure_memory(
    arm: ArmSpec, cell: Cell, prompts: list[list[int]], folder: str, dtype: str, device: str, threads: int
) -> Memory | None:
    """Let a new process load the model and decode once.

    Returns:
        What it took; None where the system does not tell.

    Raises:
        RuntimeError: the process failed; with what it said last.
    """
    job = MemoryJob(folder, dtype, device, threads, arm.to_dict(), cell.to_dict(), prompts)
    words = [sys.executable, "-m", "selfspec.tools.bench.memory_probe"]
    done = subprocess.run(words, input=json.dumps(asdict(job)), capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(f"memory of {arm.name} could not be measured: {said[-1] if said else 'no message'}")
    found = json.loads(done.stdout.splitlines()[-1])
    return None if found is None else Memory(**found)
