"""`selfspec doctor`: what selfspec runs on here, what is slow and why, what makes it fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from selfspec.measure.spare_cores import CoreWatch

if TYPE_CHECKING:
    from selfspec.tools.doctor import MachineReport, Packages


@dataclass(frozen=True)
class Diagnosis:
    """`selfspec doctor`.

    Attributes:
        packages: versions, those that are newer than tested, and what extras lack.
        findings: what is slow here and why, with the remedy.
        commit: of selfspec's source; null where it is not known.
    """

    machine: MachineReport
    packages: Packages
    findings: list[str]
    commit: str | None

    def __str__(self) -> str:
        said = ["What to change:" if self.findings else "Nothing here needs a change."]
        return "\n".join([*self._lines(), "", *said, *(f"- {each}." for each in self.findings)])

    def _lines(self) -> Iterator[str]:
        from selfspec.measure.environment import versions

        machine, numbers = self.machine, versions()
        built = "" if self.commit is None else f" (commit {self.commit})"
        yield f"selfspec      {numbers.pop('selfspec')}{built}"
        yield f"versions      {', '.join(f'{name} {number}' for name, number in numbers.items())}"
        memory = "" if machine.memory is None else f", {machine.memory / 2**30:.1f} GiB of memory"
        yield f"machine       {machine.system}, {machine.processor}{memory}"
        free = "" if machine.cores.free is None else f", {machine.cores.free:.1f} of them free"
        load = "" if machine.load is None else f", load {machine.load:.1f}"
        yield f"cores         {machine.cores.cores}{free}{load}; torch computes with {machine.threads} threads"
        yield f"GPUs          {', '.join(machine.gpus) or 'none that torch sees'}"
        absence = "" if machine.kernels_absence is None else f": {machine.kernels_absence}"
        yield f"CPU kernels   {machine.kernels or 'none'}{absence}"
        missing = self.packages.missing.items()
        extras = "; ".join(f"{extra} (lacks {', '.join(lacking)})" for extra, lacking in missing)
        yield f"extras        {'not installed: ' + extras if extras else 'all installed'}"


def doctor() -> Diagnosis:
    """Say what selfspec runs on here: versions, devices, kernels, threads and load; what is slow, why, what to do.

    Takes some seconds, runs no model and sends nothing anywhere. Paste it into bug reports.
    """
    watch = CoreWatch()
    with Console(stderr=True).status("Looking around"):
        from selfspec.measure.environment import commit
        from selfspec.tools.doctor import findings, read_machine, read_packages

        machine, packages = read_machine(watch.read()), read_packages()
    return Diagnosis(machine, packages, [*findings(machine, packages)], commit())
