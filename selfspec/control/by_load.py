"""Whether to draft in a batch whose rows come and go: by what rounds have lately gained at this load, on the clock.

In one generation no clock decides, so that a seed gives the same tokens again. Of rows that come and go, those with a
seed are coupled, and have the tokens of plain decoding whatever is drafted. For all others the output stays exact: what
a clock says of earlier rounds knows nothing of the verdict on the next draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from torch import Tensor

from selfspec.control.controller import Controller, Evidence
from selfspec.control.row_outcome import RowOutcome
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.tree_shape import Shape

# Rounds that are remembered of either kind.
_WINDOW = 16
# Rounds of either kind before they are compared, in turns of so many: passes get faster once they are recorded, which
# takes some passes of each kind. A difference by more than these factors is believed after the first turns.
_FIRST, _TURN = 32, 4
_CLEAR = (0.75, 1.25)
# A round this many times longer than usual says something about the machine, not about drafts.
_OUTLIER = 2.0
# Rounds after which the slower kind is tried again: at first, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 256, 4096
_TRIAL = 6
# By how much the other kind must be faster to take over: times scatter.
_SURELY = 1.05


class _Rounds:
    """What rounds of one kind have lately committed, and how long they took."""

    def __init__(self) -> None:
        self._tokens: deque[float] = deque(maxlen=_WINDOW)
        self._seconds: deque[float] = deque(maxlen=_WINDOW)

    def count(self, tokens: float, seconds: float) -> None:
        self._tokens.append(tokens)
        self._seconds.append(seconds)

    @property
    def rate(self) -> float:
        """Tokens of a row per second."""
        most = _OUTLIER * median(self._seconds)
        return sum(self._tokens) / max(sum(min(each, most) for each in self._seconds), 1e-9)


class _Load:
    """One range of row counts: drafts and plain rounds in comparison."""

    def __init__(self) -> None:
        self._rounds = {True: _Rounds(), False: _Rounds()}
        self._begun = 0
        # Whether drafts run, once that is known.
        self._better: bool | None = None
        self._pause = self._until_trial = _FIRST_PAUSE
        self._trial = 0

    def drafts(self) -> bool:
        """Whether the next round may draft."""
        if self._better is None:
            return self._begun // _TURN % 2 == 0
        return self._better != bool(self._trial)

    def count(self, drafted: bool, tokens: float, seconds: float) -> None:
        """Count a round; arguments as in `LoadGate.count`, but the tokens of one row."""
        self._rounds[drafted].count(tokens, seconds)
        if self._better is None:
            self._begun += 1
            if self._begun % (2 * _TURN) == 0:
                least, most = _CLEAR
                clear = not least < self._drafts_by_plain < most
                self._better = self._drafts_by_plain >= 1 if clear or self._begun >= 2 * _FIRST else None
        elif self._trial:
            self._trial -= 1
            if not self._trial:
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
                self._until_trial = self._pause
                self._compare()
        else:
            self._until_trial -= 1
            self._compare()
            if self._until_trial <= 0:
                self._trial = _TRIAL
                # What it was long ago says little.
                self._rounds[not self._better] = _Rounds()

    def _compare(self) -> None:
        """Let the other kind run where it is faster by now."""
        if (1 / self._drafts_by_plain if self._better else self._drafts_by_plain) > _SURELY:
            self._better = not self._better
            self._pause = self._until_trial = _FIRST_PAUSE

    @property
    def _drafts_by_plain(self) -> float:
        """How fast rounds are that may draft, by plain ones."""
        return max(self._rounds[True].rate, 1e-9) / max(self._rounds[False].rate, 1e-9)


class LoadGate:
    """Compares rounds that draft with plain ones, at each load apart, and lets the faster kind run.

    Loads are numbers of rows, from one power of two to the next. The slower kind is tried again now and then, less and
    less often while it stays the slower one: six rounds of four thousand in the end. A single row is left to the
    control, which is made for it.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}

    def opens(self, rows: int) -> bool:
        """Whether the next round, of so many rows, may draft. Ask once a round."""
        return rows == 1 or self._load(rows).drafts()

    def count(self, rows: int, drafted: bool, tokens: int, seconds: float) -> None:
        """Count a round.

        Args:
            rows: that it had.
            drafted: whether it was one that might draft.
            tokens: that all rows committed.
            seconds: that it took.
        """
        if rows > 1:
            self._load(rows).count(drafted, tokens / rows, seconds)

    def _load(self, rows: int) -> _Load:
        return self._loads.setdefault((rows - 1).bit_length(), _Load())


class ControllerByLoad(Controller):
    """Decides for a batch whose rows come and go.

    Args:
        inner: decides how long drafts are.
        gate: decides whether a round drafts; None: `inner` does.
        most_rows: the most rows of a batch that drafts; None: any.
    """

    def __init__(self, inner: Controller, gate: LoadGate | None = None, most_rows: int | None = None) -> None:
        super().__init__(inner.most)
        self._inner = inner
        self._gate = gate
        self.most_rows = most_rows
        self._opened = False

    def budget(self, remaining: int, unfinished: Sequence[bool]) -> Budget:
        rows = len(unfinished)
        within = self.most_rows is None or rows <= self.most_rows
        self._opened = within and (self._gate is None or self._gate.opens(rows))
        return self._inner.budget(remaining, unfinished) if self._opened else Budget.chain(0)

    def timed(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn how long the round took for which a budget was last asked, and what all its rows committed."""
        if self._gate is not None and (self.most_rows is None or rows <= self.most_rows):
            self._gate.count(rows, self._opened, tokens, seconds)

    def tries(self, match: int) -> bool:
        return self._inner.tries(match)

    def prefers(self, match: int, behind: Sequence[int]) -> bool:
        return self._inner.prefers(match, behind)

    def round_cost(self, steps: int, nodes: int) -> float:
        return self._inner.round_cost(steps, nodes)

    def shape(self, chances: tuple[float, ...], budget: Budget) -> Shape:
        return self._inner.shape(chances, budget)

    def look_up_length(self, share: float) -> int:
        return self._inner.look_up_length(share)

    def goes_on(self, scores: Tensor) -> bool:
        return self._inner.goes_on(scores)

    def keeps_lockstep(self) -> bool:
        return False

    def learn_prompt(self, evidence: Evidence) -> None:
        self._inner.learn_prompt(evidence)

    def learn(self, draft: Draft, rows: Sequence[RowOutcome | None]) -> None:
        if self._opened:
            self._inner.learn(draft, rows)
