"""Report a verification: texts compared with the model's own, and whether these are exact, or why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import chain, groupby, zip_longest
from typing import Any

from selfspec.accept import find_rule
from selfspec.decode.output import Stats
from selfspec.measure.estimate import holm_rejects
from selfspec.measure.rounding import Bound
from selfspec.tools.lab.runs import Row
from selfspec.tools.lab.table import lengths, rates
from selfspec.tools.verify.fit import Fit
from selfspec.tools.verify.settings import Settings

LEVEL = 0.01
"""Level of significance of all tests of fit together."""


class Check(StrEnum):
    """A kind of comparison."""

    FREE_RUNNING = "free-running"
    TEACHER_FORCED = "teacher-forced"
    COUPLED = "coupled"
    PLAIN = "beside plain decoding"


@dataclass(frozen=True)
class Divergence:
    """One place where tokens are not equal; None stands for a text that had ended, or no rule.

    `gap` is the distance of the two from a tie, in logits: greedily the difference of their logits, in coupled sampling
    what one of them would have to rise by for the noise to choose the other.
    """

    check: Check
    draft: str
    rule: str | None
    prompt: int
    position: int
    expected: int | None
    found: int | None
    gap: float | None

    def is_near_tie(self, bound: Bound) -> bool:
        """Return whether rounding explains it."""
        return self.gap is not None and self.gap <= bound.near_tie

    def to_dict(self, bound: Bound) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {**asdict(self), "near_tie": self.is_near_tie(bound)}


@dataclass
class Comparison:
    """Texts compared with the model's own under a rule; None where nothing is accepted or rejected."""

    check: Check
    draft: str
    rule: str | None = None
    texts: int = 0
    tokens: int = 0
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def equal_texts(self) -> int:
        """Number of texts without any difference, where each is compared until it parts."""
        return self.texts - len(self.divergences)

    @property
    def equal_tokens(self) -> int:
        """Number of tokens that are the model's own."""
        return self.tokens - len(self.divergences)

    def add(self, prompt: int, expected: Sequence[int], found: Sequence[int], gap: Callable[[int], float]) -> None:
        """Compare one more text, token by token: until it parts, or where the text is forced, to the end.

        `gap` is asked for the gap at an index where they differ, if both have a token there.
        """
        self.texts += 1
        for position, (own, other) in enumerate(zip_longest(expected, found)):
            self.tokens += 1
            if own != other:
                tie = None if own is None or other is None else gap(position)
                self.divergences.append(
                    Divergence(self.check, self.draft, self.rule, prompt, position, own, other, tie)
                )
                if self.check is not Check.TEACHER_FORCED:
                    return

    def to_dict(self) -> dict[str, Any]:
        """Return the counts, ready for JSON. Divergences are listed by the report."""
        counts = {"texts": self.texts, "tokens": self.tokens, "divergences": len(self.divergences)}
        return {"check": self.check, "rule": self.rule, **counts}


class Exactness(StrEnum):
    """A verdict."""

    EXACT = "EXACT"
    WITHIN_ROUNDING = "EXACT WITHIN ROUNDING"
    NOT_EXACT = "NOT EXACT"


@dataclass
class DraftReport:
    """Findings for one draft; `none` is plain decoding.

    Attributes:
        comparisons: by kind and rule: greedy texts with `model.generate`'s, and these read through selfspec's passes;
            of drafts, also greedy and coupled texts with plain decoding's in selfspec's loop.
        logits_off: the largest difference of any logit of the texts that were read from the stock model's one-token
            passes.
        off_plain: the largest difference of these logits from plain decoding's; 0: all have the same bits.
        texts: counts of the greedy texts of each prompt, by its number, one for each rule.
    """

    name: str
    comparisons: dict[tuple[Check, str | None], Comparison] = field(default_factory=dict)
    logits_off: float = 0.0
    off_plain: float = 0.0
    texts: dict[int, list[Stats]] = field(default_factory=dict)
    fits: list[Fit] = field(default_factory=list)

    def compared(self, check: Check, rule: str | None = None) -> Comparison:
        """Return the comparison of a kind under a rule, which begins empty."""
        return self.comparisons.setdefault((check, rule), Comparison(check, self.name, rule))

    def of(self, *checks: Check) -> list[Comparison]:
        """Return the comparisons of some kinds."""
        return [each for each in self.comparisons.values() if each.check in checks]

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """Divergences of all checks."""
        return tuple(divergence for each in self.comparisons.values() for divergence in each.divergences)

    @property
    def stats(self) -> Stats:
        """Counts of all greedy texts."""
        return Stats.together([*chain.from_iterable(self.texts.values())])

    def figures(self, bound: Bound) -> Row:
        """Return its greedy texts as a line of the lab's table, by the columns that docs/columns.md defines.

        Texts of a prompt by several rules are no further texts.
        """
        parted = [each for compared in self.of(Check.FREE_RUNNING) for each in compared.divergences]
        texts = [(Stats.together(some), len(some)) for some in self.texts.values()]
        tokens, rounds = ([getattr(each, name) / n for each, n in texts] for name in ("new_tokens", "row_rounds"))
        by_position = ("judged_per_depth", "accepted_per_depth")
        counts = ([[one / n for one in getattr(each, name)] for each, n in texts] for name in by_position)
        return {
            **lengths(tokens, rounds),
            **rates(*counts),
            "equal": 1 - len(parted) / sum(n for _, n in texts),
            "refused": not all(each.is_near_tie(bound) for each in parted),
        }

    def to_dict(self, bound: Bound) -> dict[str, Any]:
        """Return everything but the divergences, ready for JSON."""
        return {
            "draft": self.name,
            "comparisons": [compared.to_dict() for compared in self.comparisons.values()],
            "logits_off": self.logits_off,
            "off_plain": self.off_plain,
            **self.figures(bound),
            "fits": [asdict(fit) for fit in self.fits],
        }


@dataclass(frozen=True)
class VerifyReport:
    """Findings of a verification: what rounding explains, and those for each draft, plain decoding first."""

    model: str
    dtype: str
    device: str
    depth: int
    prompts: int
    settings: Settings
    bound: Bound
    drafts: Sequence[DraftReport]

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """Divergences of all drafts and checks."""
        return tuple(divergence for draft in self.drafts for divergence in draft.divergences)

    @property
    def fits(self) -> tuple[Fit, ...]:
        """Tests of fit of all drafts."""
        return tuple(fit for draft in self.drafts for fit in draft.fits)

    @property
    def rejected(self) -> tuple[Fit, ...]:
        """Fits that Holm's procedure rejects."""
        rejects = holm_rejects([fit.p_value for fit in self.fits], LEVEL)
        return tuple(fit for fit, rejected in zip(self.fits, rejects, strict=True) if rejected)

    @cached_property
    def failures(self) -> tuple[str, ...]:
        """Failures, a line each; empty unless the output is not exact."""
        return tuple(_failures(self))

    @property
    def exactness(self) -> Exactness:
        """The verdict."""
        if self.failures:
            return Exactness.NOT_EXACT
        return Exactness.WITHIN_ROUNDING if self.divergences else Exactness.EXACT

    @property
    def exact(self) -> bool:
        """True if the output is the model's own, up to rounding."""
        return not self.failures

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        if self.failures:
            more = f", and {len(self.failures) - 1} more" if len(self.failures) > 1 else ""
            return f"{self.exactness}: {self.failures[0]}{more}"
        if not self.divergences:
            tokens = _tokens(self, Check.FREE_RUNNING)
            return f"{self.exactness}: all {tokens} greedy tokens are the model's own{_bits(self)}{_sampled(self)}"
        widest = max(divergence.gap or 0.0 for divergence in self.divergences)
        number = len(self.divergences)
        return (
            f"{self.exactness}: {number} divergence{'s' * (number > 1)}, all at near-ties: gaps of at most "
            f"{widest:.2g}, and rounding closes gaps of up to {self.bound.near_tie:.2g}{_bits(self)}{_sampled(self)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "model": {"class": self.model, "dtype": self.dtype, "device": self.device, "layers": self.depth},
            "settings": {**asdict(self.settings), "prompts": self.prompts},
            "bound": self.bound.to_dict(),
            "drafts": [draft.to_dict(self.bound) for draft in self.drafts],
            "divergences": [divergence.to_dict(self.bound) for divergence in self.divergences],
            "smallest_p_value": min((fit.p_value for fit in self.fits), default=None),
            "lossless": self.settings.lossless,
            "exact": self.exact,
            "verdict": str(self.exactness),
            "sentence": self.sentence,
            "failures": list(self.failures),
        }


def _bits(report: VerifyReport) -> str:
    return ", every draft's logits plain decoding's to the bit" * all(each.off_plain == 0 for each in report.drafts)


def _tokens(report: VerifyReport, check: Check) -> int:
    return sum(compared.tokens for draft in report.drafts for compared in draft.of(check))


def _sampled(report: VerifyReport) -> str:
    tokens = _tokens(report, Check.COUPLED)
    coupled = f", {tokens} coupled tokens those of plain decoding" * bool(tokens)
    if not report.fits:
        return coupled
    smallest = min(fit.p_value for fit in report.fits)
    return f"{coupled}, and sampled tokens fit its distribution in {len(report.fits)} tests (p >= {smallest:.2g})"


def _failures(report: VerifyReport) -> Iterator[str]:
    bound = report.bound
    beyond = [divergence for divergence in report.divergences if not divergence.is_near_tie(bound)]
    for (draft, check), group in groupby(beyond, key=lambda divergence: (divergence.draft, divergence.check)):
        first, *others = group
        more = f", and {len(others)} more" if others else ""
        yield f"{draft}: {check} token {first.position + 1} of prompt {first.prompt + 1} {_how(first, bound)}{more}"
    for each in report.drafts:
        off = each.logits_off
        if off > bound.most_off:
            yield f"{each.name}: logits are off by {off:.2g}, and rounding moves them by {bound.largest:.2g}"
    for each in report.drafts if report.settings.runtime == "batch-invariant" else ():
        parted = sum(len(compared.divergences) for compared in each.of(Check.COUPLED, Check.PLAIN))
        if parted or each.off_plain:
            yield (
                f"{each.name}: logits are off plain decoding's by {each.off_plain:.2g} and {parted} texts part "
                "from its, though passes are batch-invariant"
            )
    for fit in report.rejected:
        p_value = f"p = {fit.p_value:.2g}"
        yield f"{fit.draft}: tokens sampled under {fit.rule} do not fit the model's distribution ({p_value})"
    if report.divergences and not bound.is_rounding:
        yield (
            f"the model's own passes over one and over several tokens differ by {bound.largest:.2g}, and "
            f"{bound.close_calls} of {len(bound.gaps)} tokens are decided by less: that is more than rounding, so "
            "drafting cannot be exact"
        )
    for rule in report.settings.rules:
        if not find_rule(rule).lossless:
            yield f"{rule} is not lossless, whatever was measured"


def _how(divergence: Divergence, bound: Bound) -> str:
    if divergence.expected is None or divergence.found is None or divergence.gap is None:
        return "is missing" if divergence.found is None else "is one too many"
    return (
        f"is {divergence.found} and not {divergence.expected}, with a gap of {divergence.gap:.2g} "
        f"(rounding closes up to {bound.near_tie:.2g})"
    )
