"""Sampled goodness of fit: what `generate` draws at a place, against the model's own distribution there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from selfspec.measure.progress import Watch
from selfspec.tools.verify.goodness import ChiSquare, chi_square
from selfspec.tools.verify.place import NEW_TOKENS, Outcome, Place
from selfspec.tools.verify.settings import Settings
from selfspec.tools.verify.subject import Subject

# Rounding may move a probability twice as far as it was seen to; the statistic has squares.
_SAFETY = 4
_SCORES_AT_ONCE = 2**24


@dataclass(frozen=True)
class Fit:
    """One test of goodness of fit.

    Attributes:
        draft: which draft.
        rule: which acceptance rule.
        prefix: token ids that the texts go on from.
        temperature: of the sampling.
        samples: drawn.
        cells: outcomes counted by themselves; all others are one more.
        test: the test.
    """

    draft: str
    rule: str
    prefix: tuple[int, ...]
    temperature: float
    samples: int
    cells: int
    test: ChiSquare

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        flat = {name: value for name, value in asdict(self).items() if name != "test"}
        return {**flat, "prefix": list(self.prefix), **asdict(self.test)}


@dataclass(frozen=True)
class _Trial:
    """A test to be made: what draws, under which rule, and which of the places it draws at."""

    subject: Subject
    rule: str
    turn: int


def steps(subjects: Sequence[Subject], settings: Settings) -> int:
    """How many steps `check_fits` announces."""
    return len(_trials(subjects, settings))


def check_fits(
    subjects: Sequence[Subject], places: Sequence[Place], settings: Settings, watch: Watch
) -> tuple[Fit, ...]:
    """Draw from every draft under every rule, at the places in turn, and test what was drawn.

    Tokens of a coupling rule do not depend on the draft, so there plain decoding stands for all drafts.

    Args:
        subjects: what samples, plain decoding first.
        places: where.
        settings: rules, samples and seed.
        watch: is told of the steps.

    Raises:
        NonFiniteLogitsError: logits became NaN or infinite.
    """
    seeds = torch.Generator().manual_seed(settings.seed)
    fits = []
    for trial in _trials(subjects, settings):
        watch.step(f"sampling, {trial.rule}: {trial.subject.name}")
        fits.append(_fit(trial, places[trial.turn % len(places)], settings.samples, seeds))
    return tuple(fits)


def _trials(subjects: Sequence[Subject], settings: Settings) -> list[_Trial]:
    plain, *drafting = subjects
    own = [
        _Trial(subject, rule, row + column)
        for row, subject in enumerate(drafting)
        for column, rule in enumerate(settings.sampled_rules)
    ]
    return [*own, *(_Trial(plain, rule, turn) for turn, rule in enumerate(settings.coupled_rules))]


def _fit(trial: _Trial, place: Place, samples: int, seeds: torch.Generator) -> Fit:
    counts = _drawn(trial, place, samples, seeds)
    observed = [counts[outcome] for outcome in place.cells]
    expected = [samples * probability for probability in (*place.cells.values(), place.rest)]
    noncentrality = _SAFETY * samples * place.discrepancy
    test = chi_square([*observed, samples - sum(observed)], expected, noncentrality)
    return Fit(trial.subject.name, trial.rule, place.prefix, place.temperature, samples, len(place.cells), test)


def _drawn(trial: _Trial, place: Place, samples: int, seeds: torch.Generator) -> Counter[Outcome]:
    model = trial.subject.spec.model
    prefix = torch.tensor([place.prefix], device=model.device)
    at_once = max(_SCORES_AT_ONCE // (NEW_TOKENS * model.get_input_embeddings().num_embeddings), 1)
    counts: Counter[Outcome] = Counter()
    while counts.total() < samples:
        rows = min(at_once, samples - counts.total())
        output = trial.subject.spec.generate(
            prefix.expand(rows, -1),
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=place.temperature,
            top_k=0,
            top_p=1.0,
            seed=int(torch.randint(2**62, (), generator=seeds)),
            accept=trial.rule,
        )
        new = output.sequences[:, prefix.shape[1] :].tolist()
        counts.update(tuple(row[:length]) for row, length in zip(new, output.lengths, strict=True))
    return counts
