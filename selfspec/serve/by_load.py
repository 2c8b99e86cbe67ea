"""Decide whether to draft in a batch whose rows come and go, by the measured speed of recent rounds at this load.

In one generation no clock decides, so that a seed gives the same tokens again. Where rows come and go, rows with a seed
are coupled, and so get plain decoding's tokens. Rows without a seed stay exact: times of earlier rounds do not depend
on the verdict on the next draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from math import sqrt
from statistics import median

# In the first comparison: plain rounds and rounds with drafts in a pair of turns, and the pairs. Passes get faster once
# they are recorded, after some thirty of a kind, so many plain rounds are needed to know what drafts must beat.
_FIRST_TURNS, _FIRST_PAIRS = (12, 4), 6
# Latest rounds of a kind that count.
_WINDOW = 16
# Drafts that are slower by more than this share, divided by the root of the pairs so far, are given up at once.
_CLEAR = 0.25
# A round this many times longer than usual says something about the machine, not about drafts.
_OUTLIER = 2.0
# Rounds after which the slower kind is tried again: at first, and at most (by whether drafts run). A trial of plain
# rounds risks little, and nothing but a trial shows what drafts would gain.
_FIRST_PAUSE = 512
_LONGEST_PAUSE = {True: 512, False: 4096}
# The same for a trial. If it favours drafts, a full comparison follows.
_TRIAL_TURNS, _TRIAL_PAIRS = (2, 2), 2
# Speed-ups that rounds with drafts need to begin and to continue: times scatter and do not hold all of the cost. Passes
# of drafts come in many kinds, each recorded at some cost, and rows get out of step, so plain passes vary more, too.
_GAIN, _STILL = 1.25, 1.15


_Timed = tuple[float, float]
"""Tokens that a round committed to a row, and its seconds."""


def _rate(rounds: deque[_Timed]) -> float:
    tokens, seconds = zip(*rounds, strict=True)
    most = _OUTLIER * median(seconds)
    return float(max(sum(tokens), 1e-9) / max(sum(min(each, most) for each in seconds), 1e-9))


def _compared(turns: tuple[int, int], pairs: int) -> Generator[bool, _Timed, float]:
    """Yield whether the next round may draft: in at most `pairs` pairs of turns, plain rounds and then such that draft.

    Return the speed of rounds that may draft over that of plain rounds.
    """
    rounds: dict[bool, deque[_Timed]] = {drafts: deque(maxlen=_WINDOW) for drafts in (False, True)}
    found = 1.0
    for pair in range(1, pairs + 1):
        for drafts, count in enumerate(turns):
            for _ in range(count):
                rounds[bool(drafts)].append((yield bool(drafts)))
        found = _rate(rounds[True]) / _rate(rounds[False])
        if found < 1 - _CLEAR / sqrt(pair):
            break
    return found


class _Load:
    """Decides for one range of row counts, round by round: `drafts` says whether the next one may.

    `better` is True if drafts are faster, None while unknown.
    """

    def __init__(self, better: bool | None) -> None:
        self.better = better
        self._decisions = self._decided()
        self.drafts = next(self._decisions)

    def count(self, tokens: float, seconds: float) -> None:
        self.drafts = self._decisions.send((tokens, seconds))

    def _decided(self) -> Generator[bool, _Timed, None]:
        pause, found = _FIRST_PAUSE, 0.0
        while True:
            before = self.better
            if before is not None:
                for _ in range(pause):
                    yield before
                found = yield from _compared(_TRIAL_TURNS, _TRIAL_PAIRS)
            if before is None or (not before and found > _GAIN):
                # Few rounds may gain by chance.
                found = yield from _compared(_FIRST_TURNS, _FIRST_PAIRS)
            self.better = found > (_STILL if before else _GAIN)
            pause = min(2 * pause, _LONGEST_PAUSE[self.better]) if self.better == before else _FIRST_PAUSE


class LoadGate:
    """Compares rounds that draft with plain rounds at each load, a range of row counts between powers of two.

    The slower kind is tried again now and then, drafts ever more rarely while they do not gain. Drafts gain less with
    more rows, so a load begins without drafts if a smaller load runs without. A single row is left to the control.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}

    def opens(self, rows: int) -> bool:
        """Return whether the next round, of `rows` rows, may draft; which `count` then counts."""
        return rows == 1 or self._load(rows).drafts

    def count(self, rows: int, tokens: int, seconds: float) -> None:
        """Count the round that `opens` was asked of: the tokens that all rows committed, and its seconds."""
        if rows > 1:
            self._load(rows).count(tokens / rows, seconds)

    def _load(self, rows: int) -> _Load:
        size = (rows - 1).bit_length()
        if size not in self._loads:
            plain_below = any(load.better is False for smaller, load in self._loads.items() if smaller < size)
            self._loads[size] = _Load(False if plain_below else None)
        return self._loads[size]
