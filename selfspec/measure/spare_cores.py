"""Count the free cores: those that this process may use, less what other processes keep busy."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STATISTICS = Path("/proc/stat")
# Of a line: user, nice, system, idle, iowait, irq, softirq, steal; guests are counted in the first two.
_FIELDS, _IDLE = 8, (3, 4)
# A core of which others take no more than this counts as free.
_SPARE = 0.35
# Of the cores that the threads of torch need, as many as this may be another's.
_BUSY = 0.5


@dataclass(frozen=True)
class SpareCores:
    """Cores that this process may use.

    Attributes:
        cores: their number.
        free: how many of these were idle or this process's own; None where the system does not tell.
    """

    cores: int
    free: float | None

    def threads(self, most: int) -> int:
        """Return the number of threads to compute with: one for each core that is free, from 1 to `most`.

        Threads that wait for a busy core hold up all others at the end of each product, so one fewer is faster.
        """
        if self.free is None:
            return most
        return max(1, min(most, int(self.free + _SPARE)))

    def doubt(self, threads: int) -> str | None:
        """Say why times on so many threads are unsure; None: they are not, as far as is known."""
        if self.free is None or self.free >= min(threads, self.cores) - _BUSY:
            return None
        return (
            f"other processes kept the machine busy: of {self.cores} cores {self.free:.1f} were free for {threads} "
            f"thread{'s' * (threads != 1)}, so speeds are lower and less sure than on an idle machine"
        )


class CoreWatch:
    """Watches from when it is made how busy the cores are."""

    def __init__(self) -> None:
        self._cores = _usable_cores()
        self._started = self._read()

    def read(self) -> SpareCores:
        """Return the cores that were free since the start; less than a few hundredths of a second cannot tell."""
        now, before = self._read(), self._started
        if now is None or before is None or now.total - before.total <= 0:
            return SpareCores(len(self._cores), None)
        # Clock ticks of all cores together are cores times seconds.
        share = len(self._cores) / (now.total - before.total)
        ticks = os.sysconf("SC_CLK_TCK") * (now.own - before.own)
        others = max(0.0, now.busy - before.busy - ticks) * share
        return SpareCores(len(self._cores), max(0.0, len(self._cores) - others))

    def _read(self) -> _Ticks | None:
        try:
            lines = _STATISTICS.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeError):
            return None
        wanted = {f"cpu{core}" for core in self._cores}
        counts = [
            [int(number) for number in words[1:]] for words in map(str.split, lines) if words[:1] and words[0] in wanted
        ]
        total = sum(sum(count[:_FIELDS]) for count in counts)
        idle = sum(count[place] for count in counts for place in _IDLE)
        return _Ticks(total, total - idle, time.process_time())


@dataclass(frozen=True)
class _Ticks:
    """Clock ticks of the cores since the system started, and seconds that this process computed."""

    total: int
    busy: int
    own: float


def _usable_cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
