"""Test the goodness of fit of samples: what `generate` draws at a place, against the model's distribution there.

The test is Pearson's chi-square against a distribution known up to rounding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from selfspec.api import SelfSpeculative
from selfspec.measure.rounding import Bound
from selfspec.measure.stock import end_tokens
from selfspec.measure.watch import Watch
from selfspec.model.stock_passes import logits_after
from selfspec.tools.verify.settings import Settings

# Rounding may move a logit twice as far as it was seen to; the statistic has squares.
_SAFETY = 4


@dataclass(frozen=True)
class Fit:
    """One test of goodness of fit after a prefix; `cells` are outcomes counted by themselves, all others one more.

    `degrees` of freedom are 0 where there is but one cell and so nothing to test; `noncentrality` is what rounding
    alone may add to the statistic's mean.
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
    tested: Mapping[str, SelfSpeculative], places: Sequence[Place], bound: Bound, settings: Settings, watch: Watch
) -> list[Fit]:
    """Test what every draft draws under every rule, at the places in turn.

    Tokens of a coupling rule do not depend on the draft, so there plain decoding, the first of all, is tested for all.
    The chi-square divergence that rounding makes is the variance of what it adds to logits, summed over tokens.
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
    variance = NEW_TOKENS * float(bound.gap_moved.double().square().mean())
    for draft, rule, turn in trials:
        watch.step(f"sampling, {rule}: {draft}")
        place = places[turn % len(places)]
        counts = _drawn(tested[draft], rule, place, samples, seeds)
        observed = [counts[outcome] for outcome in place.cells]
        expected = [samples * probability for probability in (*place.cells.values(), place.rest)]
        statistic = float(chisquare([*observed, samples - sum(observed)], expected).statistic)
        degrees, noncentrality = len(place.cells), _SAFETY * samples * variance / place.temperature**2
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


def sampled_texts(
    spec: SelfSpeculative,
    ids: Tensor,
    rule: str,
    new_tokens: int,
    *,
    temperature: float = 1.0,
    seed: int,
    mask: Tensor | None = None,
) -> list[list[int]]:
    """Sample the new tokens of each of the prompts, `[rows, prompt]`, with no filter that takes tokens away."""
    output = spec.generate(
        ids,
        torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        seed=seed,
        accept=rule,
    )
    new = output.sequences[:, ids.shape[1] :].tolist()
    return [row[:length] for row, length in zip(new, output.lengths, strict=True)]


def _drawn(spec: SelfSpeculative, rule: str, place: Place, samples: int, seeds: torch.Generator) -> Counter[Outcome]:
    prefix = torch.tensor([place.prefix], device=spec.model.device)
    at_once = rows_at_once(spec.model, NEW_TOKENS)
    counts: Counter[Outcome] = Counter()
    while counts.total() < samples:
        rows = prefix.expand(min(at_once, samples - counts.total()), -1)
        seed = int(torch.randint(2**62, (), generator=seeds))
        counts.update(map(tuple, sampled_texts(spec, rows, rule, NEW_TOKENS, temperature=place.temperature, seed=seed)))
    return counts


NEW_TOKENS = 3
"""Tokens of an outcome: two drafted tokens and the one after them."""

_PREFIX = 6
_TEMPERATURES = (1.0, 0.8)
# The chi-square distribution describes the statistic well enough where every cell expects this many.
_SMALLEST_EXPECTED = 5.0
# Of the first token, in nats: neither certain nor open.
_FIRST_ENTROPY = 0.8
_CANDIDATES = 32
# Numbers in a table of logits, to plan memory by.
_LOGITS_AT_ONCE = 2**24

Outcome = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """A prefix and the model's probabilities after it: of likely outcomes, by themselves, and of all others.

    An outcome has `NEW_TOKENS` tokens, or fewer that end the text.
    """

    prefix: tuple[int, ...]
    temperature: float
    cells: dict[Outcome, float]
    rest: float


@torch.no_grad()
def choose_places(model: PreTrainedModel, texts: Sequence[Sequence[int]], samples: int) -> tuple[Place, ...]:
    """Choose, for each temperature, a place in the texts where few outcomes carry much mass and every token varies."""
    width = min(_PREFIX, *(len(text) for text in texts))
    windows = sorted({tuple(text[at : at + width]) for text in texts for at in range(len(text) - width + 1)})
    prefixes = torch.tensor(windows, device=model.device)
    logits = torch.cat([model(part).logits[:, -1].float() for part in prefixes.split(rows_at_once(model, width))])
    places: list[Place] = []
    for temperature in _TEMPERATURES:
        taken = [place.prefix for place in places]
        free = [row for row, window in enumerate(windows) if window not in taken] or [0]
        places.append(_place(model, prefixes[free], logits[free], temperature, samples))
    return tuple(places)


def _place(model: PreTrainedModel, prefixes: Tensor, logits: Tensor, temperature: float, samples: int) -> Place:
    entropy = torch.special.entr((logits / temperature).softmax(-1)).sum(-1)
    candidates = prefixes[(entropy - _FIRST_ENTROPY).abs().argsort()[:_CANDIDATES]]
    smallest = _SMALLEST_EXPECTED / samples
    found = {tuple(each[0].tolist()): _cells(model, each, temperature, smallest) for each in candidates.split(1)}
    # Squared, because what is pooled hides what is wrong among it.
    prefix = max(found, key=lambda prefix: _variety(found[prefix]) * sum(found[prefix].values()) ** 2)
    cells = found[prefix]
    rest = 1 - sum(cells.values())
    if cells and rest * samples < _SMALLEST_EXPECTED:
        rest += cells.pop(min(cells, key=lambda outcome: cells[outcome]))
    return Place(prefix, temperature, cells, rest)


def rows_at_once(model: PreTrainedModel, width: int) -> int:
    """Return the number of rows of a length that may be run at once, for the memory of their logits."""
    vocabulary: int = model.get_input_embeddings().num_embeddings
    return max(_LOGITS_AT_ONCE // (width * vocabulary), 1)


def _cells(model: PreTrainedModel, prefix: Tensor, temperature: float, smallest: float) -> dict[Outcome, float]:
    """Return outcomes of at least the probability `smallest` after a prefix, `[1, tokens]`."""
    ends, past = end_tokens(model), prefix.shape[1] - 1
    found: dict[Outcome, float] = {}
    # Outcomes that are not yet whole, and their probabilities.
    branches: list[Outcome] = [()]
    mass = torch.ones(1, dtype=torch.double, device=prefix.device)
    cache, token = DynamicCache(config=model.config.get_text_config(decoder=True)), prefix[:, past:]
    if past:
        logits_after(model, cache, prefix[:, :past], 0)
    for length in range(NEW_TOKENS):
        logits = logits_after(model, cache, token, past + length)[:, -1].float()
        joint = mass[:, None] * (logits / temperature).softmax(-1).double()
        rows, choices = (joint >= smallest).nonzero(as_tuple=True)
        longer = [(*branches[row], choice) for row, choice in zip(rows.tolist(), choices.tolist(), strict=True)]
        mass = joint[rows, choices]
        ended = [length + 1 == NEW_TOKENS or outcome[-1] in ends for outcome in longer]
        found |= {outcome: p for outcome, p, over in zip(longer, mass.tolist(), ended, strict=True) if over}
        kept = [place for place, over in enumerate(ended) if not over]
        if not kept:
            break
        branches, mass, token = [longer[place] for place in kept], mass[kept], choices[kept][:, None]
        # Of states too, which have no `batch_select_indices`.
        cache.reorder_cache(rows[kept])
    return found


def _variety(cells: Mapping[Outcome, float]) -> float:
    """Return the least entropy of any of the tokens given those before it, in nats."""
    joint = []
    for length in range(NEW_TOKENS + 1):
        masses: defaultdict[Outcome, float] = defaultdict(float)
        for outcome, mass in cells.items():
            masses[outcome[:length]] += mass
        shares = torch.tensor(list(masses.values()), dtype=torch.double)
        joint.append(float(torch.special.entr(shares / shares.sum()).sum()))
    return min(longer - shorter for shorter, longer in pairwise(joint))
