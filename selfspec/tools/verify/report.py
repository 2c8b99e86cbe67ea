"""What a verification found, whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from selfspec.accept import find_rule
from selfspec.measure.rounding import Bound
from selfspec.tools.verify.divergence import Agreement, Divergence
from selfspec.tools.verify.fit import Fit
from selfspec.tools.verify.greedy import DraftGreedy
from selfspec.tools.verify.settings import Settings
from selfspec.tools.verify.verdict import Evidence, Verdict, judge


@dataclass(frozen=True)
class DraftReport:
    """What was found of one draft.

    Attributes:
        name: of the draft; `none` is plain decoding.
        greedy: greedy decoding.
        coupled: coupled sampling against plain decoding, by rule; empty for plain decoding.
        fits: tests of goodness of fit.
    """

    name: str
    greedy: DraftGreedy
    coupled: dict[str, Agreement]
    fits: tuple[Fit, ...]

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """Of all checks."""
        agreements = (*self.greedy.free_running.values(), *self.coupled.values())
        free = [divergence for agreement in agreements for divergence in agreement.divergences]
        return (*free, *self.greedy.forced.divergences)

    def to_dict(self) -> dict[str, Any]:
        """All of it but the divergences, ready for JSON."""
        return {
            "draft": self.name,
            "free_running": {rule: agreement.to_dict() for rule, agreement in self.greedy.free_running.items()},
            "teacher_forced": self.greedy.forced.to_dict(),
            "acceptance": self.greedy.acceptance.to_dict(),
            "coupled": {rule: agreement.to_dict() for rule, agreement in self.coupled.items()},
            "fits": [fit.to_dict() for fit in self.fits],
        }


@dataclass(frozen=True)
class Report:
    """What a verification found.

    Attributes:
        model: the model's class.
        dtype: what it computes in.
        device: where.
        depth: its number of layers.
        prompts: how many prompts there were.
        settings: what was asked for.
        bound: what rounding explains.
        drafts: by draft, plain decoding first.
    """

    model: str
    dtype: str
    device: str
    depth: int
    prompts: int
    settings: Settings
    bound: Bound
    drafts: tuple[DraftReport, ...]

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """Of all drafts and checks."""
        return tuple(divergence for draft in self.drafts for divergence in draft.divergences)

    @property
    def fits(self) -> tuple[Fit, ...]:
        """Of all drafts."""
        return tuple(fit for draft in self.drafts for fit in draft.fits)

    @cached_property
    def verdict(self) -> Verdict:
        """Whether the output is the model's own."""
        return judge(
            Evidence(
                bound=self.bound,
                divergences=self.divergences,
                off={draft.name: draft.greedy.forced.off for draft in self.drafts},
                fits=self.fits,
                level=self.settings.level,
                relaxed=[rule for rule in self.settings.accept if not find_rule(rule).lossless],
                greedy_tokens=sum(
                    agreement.tokens for draft in self.drafts for agreement in draft.greedy.free_running.values()
                ),
                coupled_tokens=sum(agreement.tokens for draft in self.drafts for agreement in draft.coupled.values()),
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        verdict = self.verdict
        return {
            "model": {"class": self.model, "dtype": self.dtype, "device": self.device, "layers": self.depth},
            "settings": {**self.settings.to_dict(), "prompts": self.prompts},
            "bound": self.bound.to_dict(),
            "drafts": [draft.to_dict() for draft in self.drafts],
            "divergences": [divergence.to_dict(self.bound) for divergence in self.divergences],
            "smallest_p_value": min((fit.test.p_value for fit in self.fits), default=None),
            "lossless": self.settings.lossless,
            "exact": verdict.exact,
            "verdict": str(verdict.exactness),
            "sentence": verdict.sentence,
            "failures": list(verdict.failures),
        }
