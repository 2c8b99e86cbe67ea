"""Several candidates for one place: how often the token-level rule takes one of them, and the most that any could."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.accept import TokenLevel
from selfspec.cache.tree import Tree
from selfspec.draft import Draft
from selfspec.measure.estimate import Estimate

COUNTS = (1, 2, 4)
"""How many candidates are compared."""

# Sets of candidates drawn at each place, and places judged at once.
_DRAWS, _AT_ONCE = 16, 64
# Times at which exponential clocks are read, and the first and last of them as powers of ten.
_TIMES, _FIRST, _LAST = 160, -3.0, 6.0


@dataclass(frozen=True)
class Candidates:
    """What candidates drawn without replacement are worth at one place, over the places of some texts.

    Attributes:
        count: how many there are.
        accepted: how often one is, by the token-level rule; intervals are over texts.
        best: how often one would be by the best rule there could be.
    """

    count: int
    accepted: Estimate
    best: Estimate


def candidates_at_one_place(texts: Iterable[tuple[Tensor, Tensor]], seed: int = 0) -> list[Candidates]:
    """Compare the token-level rule with the best there could be.

    Args:
        texts: p and q at the places of each text, `[places, vocab]`.
        seed: of the candidates that the rule judges. The optimum draws none.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, list[tuple[float, float, int]]] = {count: [] for count in COUNTS}
    for p, q in texts:
        for count in COUNTS:
            pieces = zip(p.double().split(_AT_ONCE), q.double().split(_AT_ONCE), strict=True)
            both = [(token_level(*each, count, generator).sum(), optimum(*each, count).sum()) for each in pieces]
            taken, best = zip(*both, strict=True)
            found[count].append((float(sum(taken)), float(sum(best)), len(p)))
    estimates = []
    for count, each in found.items():
        accepted, most, places = ([row[column] for row in each] for column in range(3))
        estimates.append(Candidates(count, Estimate.of_ratio(accepted, places), Estimate.of_ratio(most, places)))
    return estimates


def token_level(p: Tensor, q: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """The chance that the token-level rule accepts one of some candidates drawn without replacement, `[places]`.

    A mean over several draws; given these, it is exact.

    Args:
        p: the target's, `[places, vocab]`.
        q: what the first is drawn from, `[places, vocab]`.
        count: of candidates.
        generator: draws them.
    """
    p, q = p.repeat_interleave(_DRAWS, 0), q.repeat_interleave(_DRAWS, 0)
    tokens, probs, left = [], [], q
    for _ in range(count):
        # Where all that q can draw is drawn, the next may be anything.
        left = torch.where(left.sum(-1, keepdim=True) > 0, left, torch.ones_like(left))
        probs.append(left / left.sum(-1, keepdim=True))
        tokens.append(torch.multinomial(probs[-1], 1, generator=generator)[:, 0])
        left = left.scatter(-1, tokens[-1][:, None], 0.0)
    draft = Draft(torch.stack(tokens, 1), Tree((-1,) * count), torch.stack(probs, 1))
    places = p[:, None].expand(-1, count + 1, -1)
    chances = TokenLevel().accept_probs(draft, places, places.log())
    return (1 - (1 - chances).prod(-1)).view(-1, _DRAWS).mean(-1)


def optimum(p: Tensor, q: Tensor, count: int) -> Tensor:
    """The largest chance that the target's token is among candidates drawn without replacement, `[places]`.

    Over all ways to couple the two: by the smallest cut it is the least of p(A) + 1 - P(all candidates lie in A) over
    sets A of tokens (Khisti et al., 2024, arXiv 2410.18234), and A may be taken from the likeliest tokens of q for
    what p gives them, in their order (Hu et al., 2025, arXiv 2502.18779).

    Args:
        p: the target's, `[places, vocab]`.
        q: what the first candidate is drawn from, `[places, vocab]`.
        count: of candidates.
    """
    order = (q / p.clamp_min(1e-300)).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    cuts = p.cumsum(-1) + 1 - _all_within(q, count)
    return cuts.amin(-1).clamp(max=1.0)


def _all_within(q: Tensor, count: int) -> Tensor:
    """The chance that all candidates are among the first n tokens, for every n, `[places, vocab]`.

    Drawing without replacement is a race of exponential clocks, each with the rate of its token: the candidates are the
    first to ring. All lie within a set where at least so many clocks of it ring before any outside does.
    """
    if count == 1:
        return q.cumsum(-1)
    times = torch.logspace(_FIRST, _LAST, _TIMES, dtype=q.dtype)
    outside = (1 - q.cumsum(-1)).clamp_min(0.0)
    rung = torch.zeros(len(q), _TIMES, count, dtype=q.dtype)
    rung[..., 0] = 1.0
    within = torch.empty_like(q)
    for token in range(q.shape[-1]):
        rings = -torch.expm1(-q[:, token, None] * times)
        # How many of the tokens so far have rung, as far as that is less than the count.
        one_more = rung[..., :-1] * rings[..., None]
        rung = rung * (1 - rings[..., None])
        rung[..., 1:] += one_more
        enough = 1 - rung.sum(-1)
        still = torch.exp(-outside[:, token, None] * times)
        within[:, token] = _mean_at_end(enough, still)
    return within


def _mean_at_end(enough: Tensor, still: Tensor) -> Tensor:
    """The mean of `enough` at the time that `still`, which falls from 1, says the race ends at, `[places]`."""
    ends = still[:, :-1] - still[:, 1:]
    middle = (enough[:, :-1] + enough[:, 1:]) / 2
    return (ends * middle).sum(-1) + still[:, -1] * enough[:, -1]


def distributions(logits: Sequence[Tensor], temperature: float) -> list[Tensor]:
    """The distributions at a temperature, in double precision."""
    return [(each.double() / temperature).softmax(-1) for each in logits]
