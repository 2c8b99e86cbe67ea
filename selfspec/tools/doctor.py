"""Find what is slow or missing on this machine, why, and what to do: one line each."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from selfspec.compat import NEWEST_TESTED
from selfspec.device import device_name, has_doubles
from selfspec.kernels import native
from selfspec.measure.spare_cores import SpareCores
from selfspec.placement.stored import lack_of_direct_reads
from selfspec.process import machine_bytes


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
        kernels: the kind of processor that the CPU kernels which run here were built for; None: none run.
        kernels_absence: why none run, and what to do; None if they do.
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
    kernels: str | None
    kernels_absence: str | None


def read_machine(cores: SpareCores) -> MachineReport:
    """Read what computes here, and load the kernels; `cores` were watched as the process started."""
    found = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if found is None else torch.accelerator.device_count()
    library = native.library()
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
        kernels=None if library is None else library.variant,
        kernels_absence=native.absence(),
    )


_NAME = "selfspec"


@dataclass(frozen=True)
class Packages:
    """What is installed, by what selfspec says it needs.

    Attributes:
        versions: of each package that selfspec needs; None where it is missing.
        newer: packages that are newer than those that were tested, each with the newest tested.
        missing: for each extra that is not complete, the packages that it lacks.
    """

    versions: dict[str, str | None]
    newer: dict[str, str]
    missing: dict[str, list[str]]


def read_packages() -> Packages:
    """Read what is installed; empty where selfspec itself is not, but runs from its folder."""
    try:
        needed = [Requirement(line) for line in metadata.requires(_NAME) or ()]
        extras = metadata.metadata(_NAME).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return Packages({}, {}, {})
    always = [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    versions = {each.name: _version(each.name) for each in always}
    newer = {
        name: newest
        for name, newest in NEWEST_TESTED.items()
        if (found := versions.get(name)) is not None and _minor(found) > _minor(newest)
    }
    missing: dict[str, list[str]] = {}
    for extra in extras:
        of_extra = [each for each in needed if each.marker is not None and each.marker.evaluate({"extra": extra})]
        lacking = [each.name for each in of_extra if each not in always and _version(each.name) is None]
        if lacking:
            missing[extra] = lacking
    return Packages(versions, newer, missing)


def _minor(version: str) -> tuple[int, ...]:
    return Version(version).release[:2]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# Kinds of accelerators that selfspec has run on.
_TRIED = ("cuda",)


def findings(machine: MachineReport, packages: Packages) -> Iterator[str]:
    """Yield everything that is worth a change, the most useful first."""
    if machine.kernels_absence is not None:
        where = " on the CPU" if machine.gpus else ""
        why = machine.kernels_absence
        yield f"passes{where} are slower than with selfspec's CPU kernels, which do not run here: {why}"
    cores, threads = machine.cores, machine.threads
    fitting = cores.threads(cores.cores)
    if fitting < threads:
        yield (
            f"torch computes with {threads} threads, but only {cores.free:.1f} of {cores.cores} cores are free: each "
            f"product waits for the slowest. Give --threads {fitting}, or wait until less runs"
        )
    if machine.omp_num_threads is not None and threads < fitting:
        yield (
            f"OMP_NUM_THREADS={machine.omp_num_threads} holds torch to {threads} of {cores.cores} cores: unset it, or "
            f"give --threads {fitting}"
        )
    if machine.accelerator is not None and not has_doubles(torch.device(machine.accelerator)):
        yield (
            f"{machine.accelerator} has no float64, in which drafts are drawn and judged, and is refused: models run "
            "on the CPU"
        )
    elif machine.accelerator not in (None, *_TRIED):
        yield (
            f"selfspec was never run on {machine.accelerator}, and does not choose it by itself: where you give "
            f"--device {machine.accelerator}, run selfspec verify with it first"
        )
    if machine.gpu_without_cuda:
        yield "there is an NVIDIA GPU, but this torch was built for CPUs alone: install a build of torch with CUDA"
    if (lack := lack_of_direct_reads()) is not None:
        yield lack
    for name, newest in packages.newer.items():
        found = packages.versions[name]
        yield f"{name} {found} is newer than what selfspec is tested with ({newest}): run selfspec verify"
