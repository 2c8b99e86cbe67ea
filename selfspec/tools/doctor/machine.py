"""The machine: cores and their load, memory, devices, threads, and what builds the CPU kernels."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from selfspec.environment import device_name
from selfspec.kernels import native
from selfspec.measure.spare_cores import SpareCores
from selfspec.process_memory import machine_bytes

_COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class KernelState:
    """The CPU kernels.

    Attributes:
        loaded: whether they were built here for this torch, and are used.
        compiler: a C++ compiler on the path, if there is one.
        ninja: whether ninja is there, which builds them.
    """

    loaded: bool
    compiler: str | None
    ninja: bool


@dataclass(frozen=True)
class MachineReport:
    """What computes.

    Attributes:
        system: operating system and architecture.
        processor: its name.
        cores: that this process may use, and how many of them were free while it started.
        load: processes that ran or waited in the last minute, on average; None where the system does not tell.
        memory: bytes of main memory, or of the process's control group; None as above.
        threads: that torch computes with.
        omp_num_threads: the variable of that name; None where it is not set.
        gpus: names of the accelerators that torch sees.
        accelerator: what torch calls their kind, such as "cuda"; None: there is none.
        gpu_without_cuda: whether there is a GPU of NVIDIA's, and this torch was built without CUDA.
        kernels: the CPU kernels.
    """

    system: str
    processor: str
    cores: SpareCores
    load: float | None
    memory: int | None
    threads: int
    omp_num_threads: str | None
    gpus: list[str]
    accelerator: str | None
    gpu_without_cuda: bool
    kernels: KernelState


def read_machine(cores: SpareCores) -> MachineReport:
    """Read it; the kernels are loaded if they were built.

    Args:
        cores: watched while this process started.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if found is None else torch.accelerator.device_count()
    gpus = [] if found is None else [device_name(torch.device(found.type, number)) for number in range(count)]
    return MachineReport(
        system=f"{platform.system()} {platform.machine()}",
        processor=device_name(torch.device("cpu")),
        cores=cores,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        memory=machine_bytes(),
        threads=torch.get_num_threads(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        gpus=gpus,
        accelerator=None if found is None else found.type,
        gpu_without_cuda=not gpus and torch.version.cuda is None and Path("/dev/nvidiactl").exists(),
        kernels=KernelState(
            native.load_kernels(), next(filter(None, map(shutil.which, _COMPILERS)), None), _has_ninja()
        ),
    )


def _has_ninja() -> bool:
    return find_spec("ninja") is not None or shutil.which("ninja") is not None
