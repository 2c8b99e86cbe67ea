"""`selfspec doctor`: what selfspec runs on here, what is slow about it and why; to be pasted into bug reports."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from selfspec.cli.options import Output
from selfspec.cli.outcome import print_json
from selfspec.measure.spare_cores import CoreWatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from selfspec.tools.doctor.machine import Machine
    from selfspec.tools.doctor.packages import Packages
    from selfspec.tools.doctor.products import Products


def doctor(output: Output = "text") -> None:
    """Say what selfspec runs on here: versions, devices, kernels, threads and load; what is slow, why, what to do.

    Takes some seconds, runs no model and sends nothing anywhere. Paste it into bug reports.
    """
    watch = CoreWatch()
    with Console(stderr=True).status("Looking around"):
        from selfspec.environment import commit, versions
        from selfspec.tools.doctor.findings import findings
        from selfspec.tools.doctor.machine import read_machine
        from selfspec.tools.doctor.packages import read_packages
        from selfspec.tools.doctor.products import time_products

        machine, packages = read_machine(watch.read()), read_packages()
        products = time_products()
    found = findings(machine, packages, products)
    if output == "json":
        content = {"machine": asdict(machine), "packages": asdict(packages)}
        content["products"] = {name: asdict(each) for name, each in products.items()}
        print_json({**content, "findings": found, "commit": commit(), "versions": versions()})
        return
    for line in _lines(versions(), commit(), machine, packages, products):
        print(line)
    print()
    print("What to change:" if found else "Nothing here needs a change.")
    for each in found:
        print(f"- {each}.")


def _lines(
    versions: Mapping[str, str],
    commit: str | None,
    machine: Machine,
    packages: Packages,
    products: Mapping[str, Products],
) -> Iterator[str]:
    built = "" if commit is None else f" (commit {commit})"
    numbers = dict(versions)
    yield f"selfspec      {numbers.pop('selfspec')}{built}"
    yield f"versions      {', '.join(f'{name} {number}' for name, number in numbers.items())}"
    memory = "" if machine.memory is None else f", {machine.memory / 2**30:.1f} GiB of memory"
    yield f"machine       {machine.system}, {machine.processor}{memory}"
    free = "" if machine.cores.free is None else f", {machine.cores.free:.1f} of them free"
    load = "" if machine.load is None else f", load {machine.load:.1f}"
    yield f"cores         {machine.cores.cores}{free}{load}; torch computes with {machine.threads} threads"
    yield f"GPUs          {', '.join(machine.gpus) or 'none that torch sees'}"
    kernels = machine.kernels
    tools = f"compiler: {kernels.compiler or 'none'}, ninja: {'yes' if kernels.ninja else 'no'}"
    yield f"CPU kernels   {'built and used' if kernels.loaded else 'not built'} ({tools})"
    for name, each in products.items():
        yield (
            f"products      {name}: {each.gigabytes_a_second:.0f} GB/s at one token; four tokens take "
            f"{each.four_rows:.1f} times one"
        )
    extras = "; ".join(f"{extra} (lacks {', '.join(lacking)})" for extra, lacking in packages.missing.items())
    yield f"extras        {'not installed: ' + extras if extras else 'all installed'}"
