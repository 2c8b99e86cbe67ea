"""The verdict of a verification: exact, exact within rounding, or not exact and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from selfspec.measure.rounding import Bound
from selfspec.tools.verify.divergence import Divergence
from selfspec.tools.verify.fit import Fit
from selfspec.tools.verify.goodness import holm_rejects


class Exactness(StrEnum):
    """Whether selfspec's output is the model's own."""

    EXACT = "EXACT"
    WITHIN_ROUNDING = "EXACT WITHIN ROUNDING"
    NOT_EXACT = "NOT EXACT"


@dataclass(frozen=True)
class Evidence:
    """All that the verdict rests on.

    Attributes:
        bound: what rounding explains.
        divergences: of all checks.
        off: by draft, the largest difference of a logit in its teacher-forced texts.
        fits: tests of goodness of fit.
        level: of significance, of all tests together.
        relaxed: rules that were verified and are not lossless by their own word.
        greedy_tokens: compared, free-running.
        coupled_tokens: compared.
    """

    bound: Bound
    divergences: Sequence[Divergence]
    off: Mapping[str, float]
    fits: Sequence[Fit]
    level: float
    relaxed: Sequence[str]
    greedy_tokens: int
    coupled_tokens: int

    @property
    def rejected(self) -> list[Fit]:
        """Tests that Holm's procedure rejects."""
        rejects = holm_rejects([fit.test.p_value for fit in self.fits], self.level)
        return [fit for fit, rejected in zip(self.fits, rejects, strict=True) if rejected]


@dataclass(frozen=True)
class Verdict:
    """The verdict.

    Attributes:
        exactness: whether the output is the model's own.
        sentence: the verdict in one line.
        failures: what failed, a line each; empty unless the output is not exact.
    """

    exactness: Exactness
    sentence: str
    failures: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether the output is the model's own, up to rounding."""
        return self.exactness is not Exactness.NOT_EXACT


def judge(evidence: Evidence) -> Verdict:
    """Judge the evidence."""
    failures = tuple(_failures(evidence))
    if failures:
        more = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        return Verdict(Exactness.NOT_EXACT, f"NOT EXACT: {failures[0]}{more}", failures)
    sampled = _sampled(evidence)
    if not evidence.divergences:
        equal = f"all {evidence.greedy_tokens} greedy tokens are the model's own"
        return Verdict(Exactness.EXACT, f"EXACT: {equal}{sampled}", ())
    widest = max(divergence.gap or 0.0 for divergence in evidence.divergences)
    number = len(evidence.divergences)
    return Verdict(
        Exactness.WITHIN_ROUNDING,
        f"EXACT WITHIN ROUNDING: {number} divergence{'s' * (number > 1)}, all at near-ties: gaps of at most "
        f"{widest:.2g}, and rounding closes gaps of up to {evidence.bound.near_tie:.2g}{sampled}",
        (),
    )


def _sampled(evidence: Evidence) -> str:
    coupled = f", {evidence.coupled_tokens} coupled tokens those of plain decoding" * bool(evidence.coupled_tokens)
    if not evidence.fits:
        return coupled
    smallest = min(fit.test.p_value for fit in evidence.fits)
    return f"{coupled}, and sampled tokens fit its distribution in {len(evidence.fits)} tests (p >= {smallest:.2g})"


def _failures(evidence: Evidence) -> Iterator[str]:
    bound = evidence.bound
    beyond = [divergence for divergence in evidence.divergences if not divergence.is_near_tie(bound)]
    for (draft, check), group in groupby(beyond, key=lambda divergence: (divergence.draft, divergence.check)):
        first, *others = group
        more = f", and {len(others)} more" if others else ""
        yield f"{draft}: {check} token {first.position + 1} of prompt {first.prompt + 1} {_how(first, bound)}{more}"
    for draft, off in evidence.off.items():
        if off > bound.most_off:
            yield f"{draft}: logits are off by {off:.2g}, and rounding moves them by {bound.largest:.2g}"
    for fit in evidence.rejected:
        p_value = f"p = {fit.test.p_value:.2g}"
        yield f"{fit.draft}: tokens sampled under {fit.rule} do not fit the model's distribution ({p_value})"
    if evidence.divergences and not bound.is_rounding:
        yield (
            f"the model's own passes over one and over several tokens differ by {bound.largest:.2g}, and "
            f"{bound.close_calls} of {len(bound.gaps)} tokens are decided by less: that is more than rounding, so "
            "drafting cannot be exact"
        )
    for rule in evidence.relaxed:
        yield f"{rule} is not lossless, whatever was measured"


def _how(divergence: Divergence, bound: Bound) -> str:
    if divergence.expected is None or divergence.found is None or divergence.gap is None:
        return "is missing" if divergence.found is None else "is one too many"
    return (
        f"is {divergence.found} and not {divergence.expected}, with a gap of {divergence.gap:.2g} "
        f"(rounding closes up to {bound.near_tie:.2g})"
    )
