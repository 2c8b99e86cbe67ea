"""What the doctor finds: each cause with its remedy, and nothing where nothing is slow."""

from __future__ import annotations

from dataclasses import replace
from email.message import Message
from importlib import metadata

import pytest

from selfspec.measure.spare_cores import SpareCores
from selfspec.tools.doctor import KernelState, MachineReport, Packages, Products, findings, read_machine, read_packages

KERNELS = KernelState("v4", None)
MACHINE = MachineReport(
    system="Linux x86_64",
    processor="a processor",
    cores=SpareCores(4, 4.0),
    load=0.1,
    memory=2**34,
    threads=4,
    omp_num_threads=None,
    gpus=[],
    accelerator=None,
    gpu_without_cuda=False,
    kernels=KERNELS,
)
PACKAGES = Packages({"torch": "2.13.0"}, {}, {}, {})
PRODUCTS = {"torch": Products(11.0, 2.0)}


def test_nothing_is_found_where_nothing_is_slow_and_versions_that_are_not_tested_are_named() -> None:
    assert findings(MACHINE, PACKAGES, PRODUCTS) == []
    (found,) = findings(MACHINE, replace(PACKAGES, untested={"torch": ">=3"}), PRODUCTS)
    assert found == "torch 2.13.0 is outside what selfspec is tested with (>=3)"
    (found,) = findings(MACHINE, replace(PACKAGES, newer={"torch": "2.12"}), PRODUCTS)
    assert found == "torch 2.13.0 is newer than what selfspec is tested with (2.12): run selfspec verify"


@pytest.mark.parametrize(
    ("machine", "cause", "remedy"),
    [
        (
            replace(MACHINE, kernels=KernelState(None, "no compiler; install g++")),
            "four tokens cost 2.0",
            "install g++",
        ),
        (replace(MACHINE, cores=SpareCores(4, 1.2)), "only 1.2 of 4 cores are free", "--threads 1"),
        (replace(MACHINE, threads=1, omp_num_threads="1"), "OMP_NUM_THREADS=1 holds torch to 1 of 4", "--threads 4"),
        (replace(MACHINE, gpu_without_cuda=True), "built for CPUs alone", "torch with CUDA"),
    ],
)
def test_a_cause_comes_with_its_remedy(machine: MachineReport, cause: str, remedy: str) -> None:
    (found,) = findings(machine, PACKAGES, PRODUCTS)
    assert cause in found
    assert remedy in found
    assert "\n" not in found


def test_what_is_newer_is_told_by_minor_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.16.1+cpu", "transformers": "5.24.9"}
    monkeypatch.setattr(metadata, "version", lambda name: installed.get(name, "9.0"))
    monkeypatch.setattr(metadata, "requires", lambda _: ["torch>=2.13,<2.17", "transformers>=5.20,<5.26"])
    monkeypatch.setattr(metadata, "metadata", lambda _: Message())
    found = read_packages()
    assert found.newer == {"torch": "2.15"}
    assert not found.untested


def test_the_processor_is_named() -> None:
    assert read_machine(SpareCores(2, None)).processor
