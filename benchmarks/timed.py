"""How benchmarks of single passes time them and write down what they found."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def seconds_of(run: Callable[[], object]) -> float:
    """Seconds that a piece of work on a CPU takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def spread(values: Sequence[float]) -> str:
    """The median, and the quartiles in brackets."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"
