"""Sampled goodness of fit: what `generate` draws at a place, against the model's own distribution there.

Pearson's chi-square against a distribution known up to rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from selfspec.api import SelfSpeculative
from selfspec.measure.expected_time import Watch
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
    from scipy.stats import chisquare, ncx2

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
        statistic = float(chisquare([*observed, samples - sum(observed)], expected).statistic)
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
                # Without a degree of freedom there is nothing to test.
                p_value=float(ncx2.sf(statistic, degrees, noncentrality)) if degrees else 1.0,
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
