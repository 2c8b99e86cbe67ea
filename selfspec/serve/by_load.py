"""Decide whether to draft in a batch whose rows come and go, by the measured speed of recent rounds at this load.

In one generation no clock decides, so that a seed gives the same tokens again. Where rows come and go, rows with a seed
are coupled, and so get plain decoding's tokens. Rows without a seed stay exact: times of earlier rounds do not depend
on the verdict on the next draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import sqrt
from statistics import median

from selfspec.control.controller import Controller
from selfspec.draft.draft import Budget, Draft, RowVerdict

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


class _Rounds:
    """Keeps tokens and seconds of recent rounds of one kind."""

    def __init__(self) -> None:
        self.kept: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    @property
    def rate(self) -> float:
        tokens, seconds = zip(*self.kept, strict=True)
        most = _OUTLIER * median(seconds)
        return float(max(sum(tokens), 1e-9) / max(sum(min(each, most) for each in seconds), 1e-9))


class _Comparison:
    """Compares both kinds of rounds in at most `pairs` pairs of turns: plain rounds, then rounds that draft."""

    def __init__(self, turns: tuple[int, int], pairs: int) -> None:
        self.thorough = pairs >= _FIRST_PAIRS
        self._plain, self._pair, self._pairs = turns[0], sum(turns), pairs
        self._rounds = {True: _Rounds(), False: _Rounds()}
        self._counted = 0

    def drafts(self) -> bool:
        return self._counted % self._pair >= self._plain

    def count(self, drafted: bool, tokens: float, seconds: float) -> float | None:
        """Count a round; return the speed of rounds that may draft over that of plain rounds, None while unknown."""
        self._rounds[drafted].kept.append((tokens, seconds))
        self._counted += 1
        pairs, within = divmod(self._counted, self._pair)
        if within:
            return None
        found = self._rounds[True].rate / self._rounds[False].rate
        return found if pairs == self._pairs or found < 1 - _CLEAR / sqrt(pairs) else None


class _Load:
    """Decides for one range of row counts; `better` is True if drafts are faster, None while unknown."""

    def __init__(self, better: bool | None) -> None:
        self.better = better
        self._comparison = _Comparison(_FIRST_TURNS, _FIRST_PAIRS) if better is None else None
        self._pause = self._until_trial = _FIRST_PAUSE

    def drafts(self) -> bool:
        return bool(self.better) if self._comparison is None else self._comparison.drafts()

    def count(self, drafted: bool, tokens: float, seconds: float) -> None:
        if self._comparison is not None:
            found = self._comparison.count(drafted, tokens, seconds)
            if found is not None:
                self._decide(found, self._comparison.thorough)
            return
        self._until_trial -= 1
        if self._until_trial <= 0:
            self._comparison = _Comparison(_TRIAL_TURNS, _TRIAL_PAIRS)

    def _decide(self, found: float, thorough: bool) -> None:
        self._comparison, before = None, self.better
        if before is False and found > _GAIN and not thorough:
            # Few rounds may gain by chance.
            self._comparison = _Comparison(_FIRST_TURNS, _FIRST_PAIRS)
            return
        self.better = found > (_STILL if before else _GAIN)
        if before == self.better:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE[bool(before)])
        else:
            self._pause = _FIRST_PAUSE
        self._until_trial = self._pause


class LoadGate:
    """Compares rounds that draft with plain rounds at each load, a range of row counts between powers of two.

    The slower kind is tried again now and then, drafts ever more rarely while they do not gain. Drafts gain less with
    more rows, so a load begins without drafts if a smaller load runs without. A single row is left to the control.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}

    def opens(self, rows: int) -> bool:
        """Return whether the next round, of `rows` rows, may draft; call once a round."""
        return rows == 1 or self._load(rows).drafts()

    def count(self, rows: int, drafted: bool, tokens: int, seconds: float) -> None:
        """Count a round, with or without drafts: the tokens that all rows committed, and its seconds."""
        if rows > 1:
            self._load(rows).count(drafted, tokens / rows, seconds)

    def _load(self, rows: int) -> _Load:
        size = (rows - 1).bit_length()
        if size not in self._loads:
            plain_below = any(load.better is False for smaller, load in self._loads.items() if smaller < size)
            self._loads[size] = _Load(False if plain_below else None)
        return self._loads[size]


# Decisions about a draft, once the round may have one.
_LEFT_TO_INNER = (
    "tries",
    "prefers",
    "price",
    "round_cost",
    "shape",
    "look_up_length",
    "predicted_length",
    "goes_on",
    "learn_prompt",
)


class ControllerByLoad(Controller):
    """Decides for batches whose rows come and go, of up to `most_rows`: `gate` whether to draft, `inner` how long.

    While it `predicts`, since a row has a prediction, neither stops drafts.
    """

    def __init__(self, inner: Controller, gate: LoadGate | None = None, most_rows: int | None = None) -> None:
        super().__init__(inner.most)
        self._inner = inner
        self._gate = gate
        self.most_rows = most_rows
        self._opened = self.predicts = False
        for name in _LEFT_TO_INNER:
            setattr(self, name, getattr(inner, name))

    def budget(self, remaining: int, unfinished: Sequence[bool]) -> Budget:
        rows = len(unfinished)
        within = self.most_rows is None or rows <= self.most_rows
        self._opened = self.predicts or (within and (self._gate is None or self._gate.opens(rows)))
        return self._inner.budget(remaining, unfinished) if self._opened else Budget.chain(0)

    def timed(self, rows: int, tokens: int, seconds: float) -> None:
        """Count the last budget's round: its seconds, and the tokens that its rows committed."""
        within = self.most_rows is None or rows <= self.most_rows
        if self._gate is not None and within and not self.predicts:
            self._gate.count(rows, self._opened, tokens, seconds)

    def keeps_lockstep(self) -> bool:
        return False

    def learn(self, draft: Draft, rows: Sequence[RowVerdict | None]) -> None:
        if self._opened:
            self._inner.learn(draft, rows)
