"""What is kept of the quality of an arm's texts, one JSON object each, and what follows from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from selfspec.errors import BenchError
from selfspec.files.json_text import first_error
from selfspec.files.writing import whole
from selfspec.measure.estimate import Estimate
from selfspec.tools.bench.arms import ArmSpec

FILE = "quality.jsonl"


@dataclass(frozen=True)
class Difference:
    """A difference from plain decoding, and the chance of one as large if there were none."""

    estimate: Estimate
    p_value: float


@dataclass(frozen=True)
class QualitySetup:
    """What must be the same for two results to be of one thing."""

    model: str
    dtype: str
    device: str
    workload: str
    temperature: float
    max_new_tokens: int
    tasks: str


@dataclass(frozen=True)
class QualityRecord:
    """The texts of an arm, held against others. Lists have one value for each prompt.

    Attributes:
        against: "references" of the workload, or "plain decoding": a text by selfspec without a draft, sampled anew.
        lossless: whether the arm's rule is.
        exact, bleu, rouge_l: of the text, see `TextScores`.
        nats: negative log-likelihood of the whole text under the target, at temperature 1.
        tokens: of the text, the one that ends it included.
        passed: 1 where the test of the prompt passed, else 0; None where code is not run.
        absence: why the arm did not run.
    """

    setup: QualitySetup
    arm: ArmSpec
    against: str
    lossless: bool
    exact: list[float]
    bleu: list[float]
    rouge_l: list[float]
    nats: list[float]
    tokens: list[int]
    passed: list[float] | None = None
    absence: str | None = None

    @property
    def values(self) -> Mapping[str, Sequence[float] | None]:
        """The scores that are means over prompts, by name."""
        return {"exact": self.exact, "bleu": self.bleu, "rouge_l": self.rouge_l, "passed": self.passed}

    @property
    def figures(self) -> dict[str, Estimate]:
        """Means over prompts and the perplexity, with 95 % intervals by a bootstrap over prompts."""
        found = {name: _mean(values) for name, values in self.values.items() if values}
        if self.tokens:
            found["perplexity"] = _exp(Estimate.of_ratio(self.nats, self.tokens))
        return found

    def differences(self, plain: QualityRecord) -> dict[str, Difference]:
        """How much each mean differs from plain decoding's on the same prompts, in pairs; of perplexity the ratio."""
        found = {}
        for name, values in self.values.items():
            others = plain.values[name]
            if values and others:
                pairs = [own - other for own, other in zip(values, others, strict=True)]
                found[name] = Difference(_mean(pairs), p_value(pairs))
        if self.tokens and plain.tokens:
            # Of each text a mean over its tokens, since texts of two arms end at different places.
            own, other = ([n / t for n, t in zip(each.nats, each.tokens, strict=True)] for each in (self, plain))
            pairs = [one - two for one, two in zip(own, other, strict=True)]
            found["perplexity"] = Difference(_exp(_mean(pairs)), p_value(pairs))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


_RECORD = TypeAdapter(QualityRecord)


def p_value(pairs: Sequence[float], draws: int = 10_000) -> float:
    """The chance of a mean as far from 0 if each difference were as likely to have the other sign (Fisher, 1935).

    That is so where two arms draw from one distribution. All signs are tried for up to 13 pairs, and else some drawn.
    """
    values = np.asarray(pairs, float)
    if len(values) <= 13:
        signs = np.array([*product((1.0, -1.0), repeat=len(values))])
    else:
        signs = np.random.default_rng(0).choice((1.0, -1.0), (draws, len(values)))
        signs[0] = 1.0
    return float(np.mean(np.abs(signs @ values) >= abs(values.sum()) - 1e-12))


class QualityFile:
    """The results in a folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE

    def add(self, records: Sequence[QualityRecord]) -> None:
        """Keep some more, all at once."""
        kept = [*self.records(), *records]
        with whole(self._file, "what was measured before is kept: make room and repeat the command") as draft:
            draft.write_text("".join(json.dumps(each.to_dict(), allow_nan=False) + "\n" for each in kept))

    def records(self) -> list[QualityRecord]:
        """All that are kept; of one thing the latest, where it was first.

        Raises:
            BenchError: the file is no result of this version.
        """
        if not self._file.exists():
            return []
        found: dict[tuple[QualitySetup, ArmSpec], QualityRecord] = {}
        for number, line in enumerate(self._file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = _RECORD.validate_json(line, strict=True)
            except ValidationError as wrong:
                raise BenchError(
                    f"line {number} of {self._file} is no result of this version ({first_error(wrong)}); take it out"
                ) from None
            found[record.setup, record.arm] = record
        return [*found.values()]


def of_conditions(records: Sequence[QualityRecord]) -> dict[QualitySetup, list[QualityRecord]]:
    """Records by what they were measured on."""
    found: dict[QualitySetup, list[QualityRecord]] = {}
    for record in records:
        found.setdefault(record.setup, []).append(record)
    return found


def figures_of(record: QualityRecord) -> dict[str, dict[str, float]]:
    """The figures of a record, ready for JSON."""
    return {name: found.to_dict() for name, found in record.figures.items()}


def plain_of(records: Sequence[QualityRecord]) -> QualityRecord | None:
    """Plain decoding among the arms of one condition."""
    return next((each for each in records if each.arm.kind == "plain" and each.absence is None), None)


def _mean(values: Sequence[float]) -> Estimate:
    return Estimate.of_ratio(values, [1.0] * len(values))


def _exp(estimate: Estimate) -> Estimate:
    ends: Callable[[float], float] = math.exp
    return replace(estimate, value=ends(estimate.value), low=ends(estimate.low), high=ends(estimate.high))
