"""Sampled goodness of fit: what `generate` draws at a place, against the model's own distribution there.

Pearson's chi-square against a distribution known up to rounding, and Holm's procedure over all tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from selfspec.api import SelfSpeculative
from selfspec.measure.progress import Watch
from selfspec.tools.verify.place import NEW_TOKENS, Outcome, Place, rows_at_once
from selfspec.tools.verify.settings import Settings
from selfspec.tools.verify.texts import sampled_texts

# Rounding may move a probability twice as far as it was seen to; the statistic has squares.
_SAFETY = 4


@dataclass(frozen=True)
class Fit:
    """One test of goodness of fit.

    Attributes:
        prefix: token ids that the texts go on from.
        cells: outcomes counted by themselves; all others are one more.
        degrees: of freedom; 0 where there is but one cell and so nothing to test.
        noncentrality: what rounding alone may add to the statistic's mean.
        p_value: probability of a fit this bad or worse.
    """

    draft: str
    rule: str
    prefix: tuple[int, ...]
    temperature: float
    samples: int
    cells: int
    statistic: float
    degrees: int
    noncentrality: float
    p_value: float


def check_fits(
    tested: Mapping[str, SelfSpeculative], places: Sequence[Place], settings: Settings, watch: Watch
) -> list[Fit]:
    """Test what every draft draws under every rule, at the places in turn.

    Tokens of a coupling rule do not depend on the draft, so there plain decoding, the first of all, is tested for all.
    """
    plain, *drafting = tested
    trials = [
        (draft, rule, row + column)
        for row, draft in enumerate(drafting)
        for column, rule in enumerate(settings.sampled_rules)
    ]
    trials += [(plain, rule, turn) for turn, rule in enumerate(settings.coupled_rules)]
    seeds = torch.Generator().manual_seed(settings.seed)
    samples, fits = settings.samples, []
    for draft, rule, turn in trials:
        watch.step(f"sampling, {rule}: {draft}")
        place = places[turn % len(places)]
        counts = _drawn(tested[draft], rule, place, samples, seeds)
        observed = [counts[outcome] for outcome in place.cells]
        expected = [samples * probability for probability in (*place.cells.values(), place.rest)]
        statistic = chi_square([*observed, samples - sum(observed)], expected)
        degrees, noncentrality = len(place.cells), _SAFETY * samples * place.discrepancy
        fits.append(
            Fit(
                draft=draft,
                rule=rule,
                prefix=place.prefix,
                temperature=place.temperature,
                samples=samples,
                cells=len(place.cells),
                statistic=statistic,
                degrees=degrees,
                noncentrality=noncentrality,
                p_value=chi_square_tail(statistic, degrees, noncentrality),
            )
        )
    return fits


def _drawn(spec: SelfSpeculative, rule: str, place: Place, samples: int, seeds: torch.Generator) -> Counter[Outcome]:
    prefix = torch.tensor([place.prefix], device=spec.model.device)
    at_once = rows_at_once(spec.model, NEW_TOKENS)
    counts: Counter[Outcome] = Counter()
    while counts.total() < samples:
        rows = prefix.expand(min(at_once, samples - counts.total()), -1)
        seed = int(torch.randint(2**62, (), generator=seeds))
        counts.update(map(tuple, sampled_texts(spec, rows, rule, NEW_TOKENS, temperature=place.temperature, seed=seed)))
    return counts


def chi_square(observed: Sequence[int], expected: Sequence[float]) -> float:
    """Return Pearson's statistic of counts of cells, whose expectations are all positive and have the same sum."""
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in zip(observed, expected, strict=True))


def chi_square_tail(statistic: float, degrees: int, noncentrality: float) -> float:
    """Probability that a noncentral chi-square variable is at least `statistic`.

    It is a mixture of central ones with 2j more degrees of freedom, j being Poisson with mean noncentrality / 2.
    Without a degree of freedom there is nothing to test.
    """
    if not degrees:
        return 1.0
    mean = torch.tensor(noncentrality / 2, dtype=torch.double)
    # Beyond ten standard deviations of a Poisson variable nothing is left.
    more = torch.arange(int(mean + 10 * mean.sqrt()) + 50, dtype=torch.double)
    weights = (torch.special.xlogy(more, mean) - mean - torch.lgamma(more + 1)).exp()
    tails = torch.special.gammaincc(degrees / 2 + more, torch.full_like(more, statistic / 2))
    return float((weights * tails).sum().clamp(max=1.0))


def holm_rejects(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses Holm's step-down procedure rejects at a family-wise level."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
