"""Places in the model's own texts where few outcomes carry the mass, and the model's distribution there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from selfspec.measure.stock import end_tokens
from selfspec.model.stock_passes import logits_after

NEW_TOKENS = 3
"""Tokens of an outcome: two drafted tokens and the one after them."""

_PREFIX = 6
_TEMPERATURES = (1.0, 0.8)
# The chi-square distribution describes the statistic well enough where every cell expects this many.
_SMALLEST_EXPECTED = 5.0
# Of the first token, in nats: neither certain nor open.
_FIRST_ENTROPY = 0.8
_CANDIDATES = 96
# Numbers in a table of logits, and branches of a prefix, to plan memory by.
_LOGITS_AT_ONCE = 2**24
_BRANCHES = 16

Outcome = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """A prefix and what the model says after it.

    Attributes:
        cells: outcomes likely enough to be counted by themselves, and the model's probability of each: `NEW_TOKENS`
            tokens, or fewer that end the text.
        rest: probability of all other outcomes.
        discrepancy: chi-square divergence, for one draw, between the model's probabilities by one-token passes, which
            `cells` are, and by one pass over all tokens: what rounding changes.
    """

    prefix: tuple[int, ...]
    temperature: float
    cells: dict[Outcome, float]
    rest: float
    discrepancy: float


@torch.no_grad()
def choose_places(model: PreTrainedModel, texts: Sequence[Sequence[int]], samples: int) -> tuple[Place, ...]:
    """One place for each of the temperatures, where few outcomes carry much of the mass and every token varies.

    Texts are the model's own, and `samples` will be drawn at each place.
    """
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
    found: dict[tuple[int, ...], dict[Outcome, float]] = {}
    for part in candidates.split(max(rows_at_once(model, 1) // _BRANCHES, 1)):
        found |= _cells(model, part, temperature, _SMALLEST_EXPECTED / samples)
    # Squared, because what is pooled hides what is wrong among it.
    prefix = max(found, key=lambda prefix: _variety(found[prefix]) * sum(found[prefix].values()) ** 2)
    cells = found[prefix]
    rest = 1 - sum(cells.values())
    if cells and rest * samples < _SMALLEST_EXPECTED:
        rest += cells.pop(min(cells, key=lambda outcome: cells[outcome]))
    again = _probabilities_at_once(model, prefix, list(cells), temperature)
    pairs = [*zip(cells.values(), again, strict=True), (rest, 1 - sum(again))]
    return Place(prefix, temperature, cells, rest, sum((other - own) ** 2 / own for own, other in pairs))


def rows_at_once(model: PreTrainedModel, width: int) -> int:
    """How many rows of a length may be run at once, for the memory of their logits."""
    vocabulary: int = model.get_input_embeddings().num_embeddings
    return max(_LOGITS_AT_ONCE // (width * vocabulary), 1)


def _cells(
    model: PreTrainedModel, prefixes: Tensor, temperature: float, smallest: float
) -> dict[tuple[int, ...], dict[Outcome, float]]:
    """Outcomes of at least the probability `smallest` after each prefix, by passes over one token after the other.

    Prefixes are `[number, tokens]`, and no two of them equal.
    """
    ends = end_tokens(model)
    found: dict[tuple[int, ...], dict[Outcome, float]] = {tuple(prefix): {} for prefix in prefixes.tolist()}
    # Outcomes that are not yet whole, each with its prefix, and their probabilities.
    branches: list[tuple[tuple[int, ...], Outcome]] = [(prefix, ()) for prefix in found]
    mass = torch.ones(len(branches), dtype=torch.double, device=prefixes.device)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if prefixes.shape[1] > 1:
        logits_after(model, cache, prefixes[:, :-1], 0)
    token = prefixes[:, -1:]
    for length in range(1, NEW_TOKENS + 1):
        logits = logits_after(model, cache, token, prefixes.shape[1] + length - 2)[:, -1].float()
        joint = mass[:, None] * (logits / temperature).softmax(-1).double()
        rows, choices = (joint >= smallest).nonzero(as_tuple=True)
        mass, longer, kept = joint[rows, choices], [], []
        places = zip(rows.tolist(), choices.tolist(), mass.tolist(), strict=True)
        for number, (row, choice, probability) in enumerate(places):
            prefix, outcome = branches[row][0], (*branches[row][1], choice)
            if length == NEW_TOKENS or choice in ends:
                found[prefix][outcome] = probability
            else:
                longer.append((prefix, outcome))
                kept.append(number)
        if not kept:
            break
        branches, mass, token = longer, mass[kept], choices[kept][:, None]
        # Of states too, which have no `batch_select_indices`.
        cache.reorder_cache(rows[kept])
    return found


def _variety(cells: Mapping[Outcome, float]) -> float:
    """The least entropy of any of the tokens given those before it, in nats: what every one of them is tested by."""
    joint = []
    for length in range(NEW_TOKENS + 1):
        masses: defaultdict[Outcome, float] = defaultdict(float)
        for outcome, mass in cells.items():
            masses[outcome[:length]] += mass
        shares = torch.tensor(list(masses.values()), dtype=torch.double)
        joint.append(float(torch.special.entr(shares / shares.sum()).sum()))
    return min(longer - shorter for shorter, longer in pairwise(joint))


def _probabilities_at_once(
    model: PreTrainedModel, prefix: tuple[int, ...], outcomes: Sequence[Outcome], temperature: float
) -> list[float]:
    """Probability of each outcome, by one pass over prefix and outcome."""
    probabilities = []
    start = len(prefix) - 1
    width = start + NEW_TOKENS
    for first in range(0, len(outcomes), rows_at_once(model, width)):
        part = outcomes[first : first + rows_at_once(model, width)]
        # What follows an outcome that ended early is not looked at.
        texts = [[*prefix, *outcome, *[outcome[-1]] * NEW_TOKENS][: width + 1] for outcome in part]
        read = torch.tensor(texts, device=model.device)
        p = (model(read[:, :-1]).logits[:, start:].float() / temperature).softmax(-1).double()
        chosen: Tensor = p.gather(-1, read[:, start + 1 :, None])[..., 0]
        probabilities += [row[: len(outcome)].prod().item() for row, outcome in zip(chosen, part, strict=True)]
    return probabilities
