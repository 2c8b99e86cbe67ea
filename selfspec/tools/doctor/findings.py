"""What is slow or missing here, why, and what to do: one line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from selfspec.tools.doctor.machine import MachineReport
from selfspec.tools.doctor.packages import Packages
from selfspec.tools.doctor.products import Products

# A block of four tokens that costs more than this many steps eats most of what drafts gain.
_DEAR = 1.5
# Kinds of accelerators that selfspec has run on.
_TRIED = ("cuda",)


def findings(machine: MachineReport, packages: Packages, products: Mapping[str, Products]) -> list[str]:
    """Everything that is worth a change, most useful first."""
    return [*_kernels(machine, products), *_threads(machine), *_gpu(machine), *_packages(packages)]


def _kernels(machine: MachineReport, products: Mapping[str, Products]) -> Iterator[str]:
    found, torchs = machine.kernels, products["torch"]
    if found.loaded:
        return
    where = "on the CPU, " if machine.gpus else ""
    said = f"{where}torch reads weights at {torchs.gigabytes_a_second:.0f} GB/s for one token"
    if torchs.four_rows > _DEAR:
        said += f", and four tokens cost {torchs.four_rows:.1f} times one, which eats what drafts gain"
    if found.compiler is None:
        yield f"{said}. selfspec's CPU kernels do better, but need a C++ compiler: install g++ or clang"
    elif not found.ninja:
        yield f"{said}. selfspec's CPU kernels do better: pip install 'selfspec[kernels]', then selfspec kernels"
    else:
        yield f"{said}. selfspec's CPU kernels do better: build them once with selfspec kernels"


def _threads(machine: MachineReport) -> Iterator[str]:
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


def _gpu(machine: MachineReport) -> Iterator[str]:
    if machine.accelerator not in (None, *_TRIED):
        yield (
            f"selfspec was never run on {machine.accelerator}, and does not choose it by itself: where you give "
            f"--device {machine.accelerator}, run selfspec verify with it first"
        )
    if machine.gpu_without_cuda:
        yield "there is an NVIDIA GPU, but this torch was built for CPUs alone: install a build of torch with CUDA"


def _packages(packages: Packages) -> Iterator[str]:
    for name, wanted in packages.untested.items():
        yield f"{name} {packages.versions[name]} is outside what selfspec is tested with ({wanted})"
    for name, newest in packages.newer.items():
        found = packages.versions[name]
        yield f"{name} {found} is newer than what selfspec is tested with ({newest}): run selfspec verify"
