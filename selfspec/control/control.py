"""How long to draft, and when not to draft at all.

A control is configuration. What it begins decides for one generation, from what the draft itself shows (its scores up
to the last token drafted) and from rounds that are over, never from the verdict on the draft in hand and never from a
clock: so the output stays exact, and a seed gives the same tokens again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

from torch import Tensor

from selfspec.arguments import check_kind, shown
from selfspec.control.costs import Costs, CostsByRows
from selfspec.errors import DraftConfigError

if TYPE_CHECKING:
    from selfspec.decode.evidence import Evidence
    from selfspec.draft.draft import Draft

# Longer matches of a look-up are told apart no more.
_LONG_MATCH = 12


@dataclass(frozen=True)
class RowOutcome:
    """What became of one live row in a round.

    Attributes:
        judged: draft tokens the target judged.
        accepted: draft tokens that stood, whether or not they were committed.
        committed: tokens committed, the target's own included.
        dropped: tokens that stood as well, and were dropped to keep rows in step.
    """

    judged: int
    accepted: int
    committed: int
    dropped: int = 0


class Controller(ABC):
    """Decides for one generation.

    Attributes:
        longest: the most tokens that are ever drafted in a round; slots of the cache are kept for them.
        judges_prompt: whether it wants to know what the draft is worth on the prompt.
    """

    longest: int
    judges_prompt = False

    @abstractmethod
    def choose(self, remaining: int, live: Sequence[bool]) -> int:
        """The most tokens to draft in the round that begins; 0: none.

        One token of every round is the target's own, so more than `remaining` - 1 are never of use.

        Args:
            remaining: tokens still wanted, at least 1.
            live: of each row that runs, whether it goes on.
        """

    def tries(self, match: int) -> bool:
        """Whether a draft of some source is worth a round.

        Args:
            match: 0: the model drafts; else a look-up does, with a match of so many tokens.
        """
        return True

    def prefers(self, match: int) -> bool:
        """Whether a look-up with a match of so many tokens promises more than drafting with the model."""
        return True

    def look_up_length(self, share: float) -> int:
        """The most tokens worth looking up at once in the round that begins; 0: none.

        Args:
            share: of the rows that are furthest behind, that has a match.
        """
        return self.longest

    def goes_on(self, scores: Tensor) -> bool:
        """Whether to draft another token after the one just drafted, which is kept in any case.

        Dropping a token for what it is would bias the output; deciding after it whether to draft on does not.

        Args:
            scores: what that token was drawn from, `[rows, 1, vocab]`.
        """
        return True

    def keeps_step(self) -> bool:
        """Whether rows that stand alike are to stay so in the round at hand: all then commit as many as the worst.

        Asked in every round whose rows stand alike, before its verdict is told: the answer must depend neither on that
        nor on the draft in hand.
        """
        return False

    def learn_prompt(self, evidence: Evidence) -> None:
        """Take in what the draft is worth on the prompt, before the first round."""
        return

    def learn(self, draft: Draft, rows: Sequence[RowOutcome | None]) -> None:
        """Take in what became of a round.

        Args:
            draft: of the round.
            rows: what became of it in each row that ran; None for a row that had ended.
        """
        return


class Control(ABC):
    """How draft lengths are chosen."""

    @abstractmethod
    def begin(self, costs: CostsByRows) -> Controller:
        """The controller of one generation.

        Args:
            costs: measured or estimated for model and draft.
        """


@dataclass(frozen=True)
class FixedLength(Control):
    """The same draft length every round.

    Attributes:
        length: tokens to draft, at least 1.
    """

    length: int

    def __post_init__(self) -> None:
        _check_length(self.length)

    def begin(self, costs: CostsByRows) -> Controller:
        return _Fixed(self.length)


@dataclass(frozen=True)
class ConfidenceStop(Control):
    """Drafts until a token's confidence, the largest probability where it was drawn, falls under a threshold.

    Under exact rules the token that fell under it stays in the draft. In a batch drafting ends when no live row is
    confident.

    Attributes:
        threshold: in 0..1.
        longest: the most tokens of a draft.
    """

    threshold: float = 0.5
    longest: int = 7

    def __post_init__(self) -> None:
        _check_length(self.longest)
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, Real) or not 0 <= self.threshold <= 1:
            raise DraftConfigError(f"a confidence threshold lies in 0..1, got {self.threshold!r}")

    def begin(self, costs: CostsByRows) -> Controller:
        return _Confident(self)


@dataclass(frozen=True)
class CostAware(Control):
    """Drafts as long as one more token promises more than it costs, and not at all where drafting does not pay.

    The chance that a token is accepted is learnt as the generation goes, by the draft's confidence in it. With the
    costs that makes a problem of optimal stopping: a draft goes on while the chance that all of it stands, and the next
    token too, is worth more than a draft step at the speed achieved so far. Where rounds with a draft have lost more
    plain steps than a few, and one for each two hundred rounds, draft length is 0 until there is something to lose
    again. That holds for the model's drafts, and for look-ups of each length of match; and all together may lose no
    more than one of them. Of a short text the few are at most a twenty-fifth; and where not even a good draft would
    pay, as in large batches, they are not spent at all.

    A batch is done when its hindmost row is, so in a batch a draft gains what it gains there, in the long run.
    Look-ups, which draft all they may in a single row, draft as much as pays in one.
    Rows are kept in step to begin with: each commits as many tokens of a round as the worst does, since
    passes over rows at different places take longer, those without a draft among them. Once a draft has shown what pays
    for that, each row goes its own way, to the end.

    Attributes:
        longest: the most tokens of a draft.
        costs: what the parts of a round cost here, as `Costs` or `BatchCosts`; None: what was measured, and else an
            estimate from the weights a draft step reads.
    """

    longest: int = 7
    costs: CostsByRows | None = None

    def __post_init__(self) -> None:
        _check_length(self.longest)
        check_kind("costs", self.costs, CostsByRows, "write Costs(draft=0.3), or leave them out")

    def begin(self, costs: CostsByRows) -> Controller:
        return _CostAware(self.longest, self.costs or costs)


def _check_length(length: int) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise DraftConfigError(f"draft length must be an integer of at least 1, got {shown(length)}")


class NoDraft(Controller):
    """Plain decoding."""

    longest = 0

    def choose(self, remaining: int, live: Sequence[bool]) -> int:
        return 0


class _Fixed(Controller):
    def __init__(self, length: int) -> None:
        self.longest = length

    def choose(self, remaining: int, live: Sequence[bool]) -> int:
        return min(self.longest, remaining - 1)


class _Confident(Controller):
    def __init__(self, control: ConfidenceStop) -> None:
        self.longest = control.longest
        self._threshold = control.threshold
        self._live: Sequence[bool] = ()

    def choose(self, remaining: int, live: Sequence[bool]) -> int:
        self._live = live
        return min(self.longest, remaining - 1)

    def goes_on(self, scores: Tensor) -> bool:
        confidences = zip(_confidences(scores), self._live, strict=True)
        return any(live and confidence >= self._threshold for confidence, live in confidences)


class _CostAware(Controller):
    judges_prompt = True

    def __init__(self, longest: int, costs: CostsByRows) -> None:
        self.longest = longest
        self._by_rows, self._costs = costs, costs.in_batch(1)
        self._prospects = _Prospects(self._costs, longest)
        self._acceptance = _Acceptance()
        self._model = _Gate()
        self._look_ups: dict[int, _Gate] = {}
        self._in_step = True
        self._committed, self._stood = _Pace(), _Pace()
        self._rounds = 0
        self._at_once = self._model_at_once = 0.0
        self._on_prompt: float | None = None
        self._live: Sequence[bool] = ()
        self._reached: list[float] = []
        self._confidences: list[list[float]] = []

    def choose(self, remaining: int, live: Sequence[bool]) -> int:
        self._live = live
        if not self._rounds:
            self._at_once = self._model_at_once = min(_MAY_LOSE, _OF_ALL * remaining)
        self._rounds += 1
        if len(live) != self._costs.rows:
            self._costs = self._by_rows.in_batch(len(live))
            self._prospects = _Prospects(self._costs, self.longest)
        if self._rounds == 1 and self._on_prompt is not None:
            self._model_at_once = _MAY_LOSE if self._prospects.pays(self._on_prompt) else 0.0
        self._reached = [1.0] * len(live)
        self._confidences = []
        return min(self.longest, remaining - 1)

    def tries(self, match: int) -> bool:
        gate = self._gate(match)
        # Asked in any case: each counts how often it was.
        at_once = self._at_once if match else self._model_at_once
        opens = gate.opens(at_once, self._prospects.of_look_up if match else self._at_risk)
        return opens and (gate.gains or self._paid <= may_lose(max(at_once, self._at_once), self._rounds))

    def look_up_length(self, share: float) -> int:
        return self._prospects.look_up_length(share)

    def prefers(self, match: int) -> bool:
        # A look-up costs next to nothing to try, so it need not have proved itself yet.
        look_up = self._gate(match)
        return look_up.is_new or look_up.rate >= max(1.0, self._model.rate)

    def goes_on(self, scores: Tensor) -> bool:
        confidences = _confidences(scores)
        self._confidences.append(confidences)
        self._reached = [
            reached * self._acceptance.chance(confidence)
            for reached, confidence in zip(self._reached, confidences, strict=True)
        ]
        standing = [reached for reached, live in zip(self._reached, self._live, strict=True) if live]
        promised = self._acceptance.mean * sum(standing) / len(standing)
        # What a plain step would commit in the time of a draft step, at the speed of the rounds so far.
        return promised > max(1.0, self._model.rate) * (self._costs.draft + self._costs.widening)

    def keeps_step(self) -> bool:
        return self._in_step

    def learn_prompt(self, evidence: Evidence) -> None:
        for confidence, chance in zip(evidence.confidences, evidence.chances, strict=True):
            self._acceptance.count(confidence, chance, _ON_PROMPT)
        # Drawn towards what a fair draft shows, as by two tokens more.
        mean = (sum(evidence.chances) + 2 * 0.6) / (len(evidence.chances) + 2)
        self._on_prompt = mean + mean**2 * (1 - mean)

    @property
    def _at_risk(self) -> float:
        """What a draft of the model may lose that promises nothing: see `_Gate.opens`."""
        if self._on_prompt is None or self._prospects.pays(self._on_prompt):
            return self._prospects.of_model
        return self._costs.of_round(1, 1) - 1

    def learn(self, draft: Draft, rows: Sequence[RowOutcome | None]) -> None:
        outcomes = [row for row in rows if row is not None]
        if not draft.length or not outcomes:
            return
        for position, confidences in enumerate(self._confidences):
            for row, confidence in zip(rows, confidences, strict=True):
                if row is not None and position < row.judged:
                    self._acceptance.count(confidence, position < row.accepted)
        committed = self._committed.after([None if row is None else row.committed for row in rows])
        stood = self._stood.after([None if row is None else row.committed + row.dropped for row in rows])
        gate = self._gate(draft.match)
        gate.count(committed, stood - committed, self._costs.of_round(draft.steps, draft.length))
        if not gate.is_new and gate.rate > self._costs.out_of_step:
            self._in_step = False

    @property
    def _paid(self) -> float:
        """Plain steps that sources of drafts have lost: all together they may lose no more than one alone."""
        return sum(max(gate.paid, 0.0) for gate in (self._model, *self._look_ups.values()))

    def _gate(self, match: int) -> _Gate:
        if match == 0:
            return self._model
        return self._look_ups.setdefault(min(match, _LONG_MATCH), _Gate())


class _Pace:
    """How far drafts take a batch, whose end is that of its hindmost row.

    Rows may be alike, and the hindmost of a few rounds catch up; or one may loop and another not, and it falls behind
    for good. So what each row has gained is drawn towards the mean of all, the less the more rounds there have been.
    """

    _PRIOR = 8.0  # rounds

    def __init__(self) -> None:
        self._gained: list[int] = []
        self._rounds = 0

    def after(self, tokens: Sequence[int | None]) -> float:
        """By how many tokens the batch is further after a round with a draft. Others take all rows equally far.

        Args:
            tokens: that each row gained; None for a row that had ended. At least one had not.
        """
        if len(tokens) != len(self._gained):
            self._gained, self._rounds = [0] * len(tokens), 0
        going = [index for index, count in enumerate(tokens) if count is not None]
        before = self._place(going)
        self._rounds += 1
        self._gained = [gained + (count or 0) for gained, count in zip(self._gained, tokens, strict=True)]
        return self._place(going) - before

    def _place(self, going: Sequence[int]) -> float:
        gained = [self._gained[index] for index in going]
        mean = sum(gained) / len(gained)
        return mean - (mean - min(gained)) * self._rounds / (self._rounds + self._PRIOR)


class _Acceptance:
    """How often tokens of each confidence are accepted.

    Begins with what a fair draft shows. That is more often than it is confident where it is unsure: the target is then
    unsure as well, and two flat distributions overlap. A draft that is accepted more or less often than a fair one of
    the same confidences shifts the chances of all confidences, those not yet seen among them, by the same log-odds.
    What was seen of a confidence itself counts beside that.
    """

    _BINS = 10
    _PRIOR = 4.0  # tokens
    _UNSURE, _SURE = 0.35, 0.95
    _FAIR_MEAN = 0.6

    def __init__(self) -> None:
        width = (self._SURE - self._UNSURE) / self._BINS
        self._fair = [self._UNSURE + (index + 0.5) * width for index in range(self._BINS)]
        self._accepted = [0.0] * self._BINS
        self._judged = [0.0] * self._BINS
        self._shift = 0.0

    @property
    def mean(self) -> float:
        """The chance of a token whose confidence is not known."""
        return self._drawn(sum(self._accepted), sum(self._judged))

    def chance(self, confidence: float) -> float:
        """The chance that a token is accepted which the draft is so confident of."""
        bin_ = self._bin(confidence)
        shifted = 1 / (1 + math.exp(-_log_odds(self._fair[bin_]) - self._shift))
        return (self._PRIOR * shifted + self._accepted[bin_]) / (self._PRIOR + self._judged[bin_])

    def count(self, confidence: float, accepted: float, weight: float = 1.0) -> None:
        """Take in a token that was judged.

        Args:
            confidence: of the draft in it.
            accepted: whether it was, or the chance that it would be.
            weight: in tokens.
        """
        bin_ = self._bin(confidence)
        self._judged[bin_] += weight
        self._accepted[bin_] += weight * accepted
        of_fair = sum(fair * judged for fair, judged in zip(self._fair, self._judged, strict=True))
        self._shift = _log_odds(self.mean) - _log_odds(self._drawn(of_fair, sum(self._judged)))

    def _drawn(self, accepted: float, judged: float) -> float:
        """A rate, drawn towards a fair draft's."""
        return (accepted + self._PRIOR * self._FAIR_MEAN) / (judged + self._PRIOR)

    def _bin(self, confidence: float) -> int:
        return min(int(confidence * self._BINS), self._BINS - 1)


def _log_odds(chance: float) -> float:
    return math.log(chance / (1 - chance))


# Plain steps that drafts may lose at any time, but at most so much of all there will be, and for each round more.
_MAY_LOSE, _OF_ALL, _FOR_EACH_ROUND = 3.0, 0.04, 0.005
# What a token of the prompt counts beside one of the model's own text. That is easier to draft: where tokens of prompts
# are accepted with chance a, those of its own text were with about a + a^2 (1 - a), on the models that were looked at.
_ON_PROMPT = 0.25
# What a draft has to promise on the prompt, in plain decoding's speed, to be tried at once.
_WORTH_TRYING = 1.02
# How often tokens of a good draft are accepted; and a length beyond which more of them gain a billionth of a token.
_GOOD = 0.85
_LONG_DRAFT = 128


def may_lose(at_once: float, rounds: int) -> float:
    """What drafts may have lost after so many rounds, in plain steps.

    Args:
        at_once: what they may lose to begin with.
        rounds: of the generation so far.
    """
    return at_once + _FOR_EACH_ROUND * rounds


class _Gate:
    """Whether drafting may go on: while what it has lost, in plain steps, stays within what it may lose.

    That is a few steps to begin with, and half a hundredth of a step for each round since: so a draft is given time to
    show what it is worth, one that is worth nothing is tried again now and then, and all of it costs about a percent.
    """

    _TRIALS = 4
    _MEMORY = 0.9  # a round's weight beside the next one's

    def __init__(self) -> None:
        self._tokens = self._cost = 0.0
        self._lost = self.paid = 0.0
        self._rounds = self._asked = 0

    @property
    def rate(self) -> float:
        """Tokens per plain step that rounds with a draft have gained lately, were none dropped; 1 before the first."""
        return self._tokens / self._cost if self._cost else 1.0

    @property
    def is_new(self) -> bool:
        """Whether too few rounds have been seen to judge by."""
        return self._rounds < self._TRIALS

    def opens(self, at_once: float, at_risk: float) -> bool:
        """Whether the round that begins may draft. Asked once a round.

        Args:
            at_once: what it may lose to begin with.
            at_risk: what it may lose, of a draft that promises nothing: it has to be saved up first. Else 0.
        """
        self._asked += 1
        if at_risk > 0 and not self.gains:
            return self._lost + at_risk <= may_lose(0.0, self._asked)
        return self._lost <= may_lose(at_once, self._asked)

    @property
    def gains(self) -> bool:
        """Whether its drafts have gained at least what they cost, as far as this may be held against them."""
        return self._rounds > 0 and self._lost <= 0

    def count(self, committed: float, dropped: float, cost: float) -> None:
        """Take in a round with a draft: tokens of a row, and plain steps."""
        self._tokens = self._MEMORY * self._tokens + committed + dropped
        self._cost = self._MEMORY * self._cost + cost
        # What is dropped while a draft is tried out is the price of the trial. It would shut out the good ones of large
        # batches, where the worst row commits next to nothing, before they have shown that they are good.
        gained = committed + dropped if self.is_new else committed
        # Gains of long ago do not pay for losses without end.
        self._lost = max(self._lost + cost - gained, -_MAY_LOSE)
        self.paid = max(self.paid + cost - committed, -_MAY_LOSE)
        self._rounds += 1


class _Prospects:
    """What the costs of a batch let a draft hope for, good as it may be.

    Args:
        costs: of the batch.
        longest: the most tokens of a draft.

    Attributes:
        of_model: what the shortest round loses if nothing stands, in plain steps; 0 where a good draft would pay.
        of_look_up: the same where drafts are looked up.
    """

    def __init__(self, costs: Costs, longest: int) -> None:
        self._costs = costs
        self._longest = longest
        self._lengths = range(1, min(longest, _LONG_DRAFT) + 1)
        self.of_model, self.of_look_up = self._risk(steps=1), self._risk(steps=0)

    def pays(self, chance: float) -> bool:
        """Whether a draft of the model gains whose tokens are accepted with this chance."""
        return any(self._speed(1, length, chance=chance) > _WORTH_TRYING for length in self._lengths)

    def look_up_length(self, share: float) -> int:
        """Tokens to look up at once where a share of the hindmost rows has a match; 0: they would not pay for all.

        One row looks up all it may, for next to nothing; each token is one more in every row of a batch.
        """
        if self._costs.rows == 1:
            return self._longest
        best = max(self._lengths, key=lambda length: self._speed(0, length, share))
        return best if share == 1 or self._speed(0, best, share) > 1 else 0

    def _risk(self, steps: int) -> float:
        pays = any(self._speed(steps, length) > 1 for length in self._lengths)
        return 0.0 if pays else self._costs.of_round(steps, 1) - 1

    def _speed(self, steps: int, length: int, share: float = 1.0, chance: float = _GOOD) -> float:
        """Tokens per plain step, of a row on average."""
        rows, cost = self._costs.rows, self._costs.of_round(steps * length, length)
        apart = (1 + share * (_expected(chance, length) - 1)) / (cost * (self._costs.out_of_step if rows > 1 else 1.0))
        # In step only what stands in every row counts.
        together = _expected(chance**rows if share == 1 else 0.0, length) / cost
        return max(apart, together)


def _expected(chance: float, length: int) -> float:
    """Tokens that a round commits on average if each token drafted stands with the same chance."""
    return sum(chance**place for place in range(length + 1))


def _confidences(scores: Tensor) -> list[float]:
    """The largest probability of each row, `[rows]`; 0 where there is none. Waits for the device."""
    largest = scores[:, 0].softmax(-1).amax(-1)
    confidences: list[float] = largest.nan_to_num(0.0).tolist()
    return confidences
