"""Linear layers of a block of few tokens on a CPU: torch's own and selfspec's view of them.

    python benchmarks/few_rows.py

For each shape and number of rows: time of a block against torch's own for one row, median over interleaved repeats.
What selfspec's view does depends on the processor, so each kind has a file of results of its own.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
from harness import keep, seconds_of
from rich.progress import track
from torch import nn

from selfspec.measure.environment import environment
from selfspec.runtime.few_rows import for_few_rows
from selfspec.tools.lab.report import markdown_table

_SHAPES = ((256, 704), (576, 1536), (1024, 4096))
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 48)
# Larger than the caches of most processors, together: what a pass over a model reads comes from memory.
_BYTES = 96 * 2**20


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    figures = [
        figure
        for threads in options.threads
        for width, outputs in track(_SHAPES, f"{threads} threads", transient=True)
        for figure in _measured(width, outputs, threads, options)
    ]
    record = {"settings": vars(options), "environment": environment(torch.device("cpu")), "figures": figures}
    kind = "" if options.dtype == "float32" else f"_{options.dtype}"
    name = f"few_rows_{torch.backends.cpu.get_cpu_capability().lower()}{kind}"
    keep(name, record, _table(figures))
    print(_table(figures))


@torch.no_grad()
def _measured(width: int, outputs: int, threads: int, options: argparse.Namespace) -> list[dict[str, object]]:
    torch.set_num_threads(threads)
    dtype = getattr(torch, options.dtype)
    number = max(2, _BYTES // (dtype.itemsize * width * outputs))
    layers = [nn.Linear(width, outputs, bias=False, dtype=dtype) for _ in range(number)]
    ways: dict[str, Sequence[nn.Module]] = {"torch": layers, "selfspec": [*map(for_few_rows, layers)]}
    cases = [(way, rows) for rows in _ROWS for way in ways]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    states = {rows: torch.randn(1, rows, width, dtype=dtype) for rows in _ROWS}
    for repeat in range(options.repeats + 1):
        for way, rows in cases:
            spent = seconds_of(lambda: [layer(states[rows]) for layer in ways[way]])  # noqa: B023 - called at once
            if repeat:
                seconds[way, rows].append(spent)
    one = statistics.median(seconds["torch", 1])
    shape = {"threads": threads, "shape": [width, outputs]}
    return [{**shape, "rows": n, **{way: statistics.median(seconds[way, n]) / one for way in ways}} for n in _ROWS]


def _table(figures: list[dict[str, object]]) -> str:
    rows: dict[tuple[str, ...], list[str]] = {}
    for figure in figures:
        threads, shape = str(figure["threads"]), str(figure["shape"])[1:-1].replace(", ", " to ")
        for way in ("torch", "selfspec"):
            rows.setdefault((threads, shape, way), []).append(f"{figure[way]:.2f}")
    heads = ["threads", "shape", "", *(f"{number} rows" for number in _ROWS)]
    return markdown_table(heads, [[*named, *cells] for named, cells in rows.items()]) + "\n"


if __name__ == "__main__":
    main()
