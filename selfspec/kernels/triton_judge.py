"""Judge chains token by token or as a block on a CUDA device, in Triton: pieces of the vocabulary beside each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.trial import Trial

# Tokens that a program processes together.
_BLOCK = 4096
_TRIAL = Trial("judging of chains")

Given = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]


@triton.jit
def _ratio(own, drawn, tokens, node, vocabulary, is_drawn: tl.constexpr):
    """Return p(x) / q(x) of the token of a node."""
    token = tl.load(tokens + node)
    ratio = tl.load(own + node * vocabulary + token)
    if is_drawn:
        # Infinite where q is close to 0; times 0, the weight of a parent, it would be NaN.
        ratio = tl.minimum(tl.div_rn(ratio, tl.load(drawn + node * vocabulary + token)), 3.4028234663852886e38)
    return ratio


@triton.jit
def _q_of(drawn, tokens, node, vocabulary, token, inside, is_drawn: tl.constexpr):
    """Return q of a piece of the vocabulary at a node."""
    if is_drawn:
        q = tl.load(drawn + node * vocabulary + token, mask=inside, other=0.0)
    else:
        q = tl.where(token == tl.load(tokens + node), 1.0, 0.0).to(tl.float32)
    return q


@triton.jit
def sum_residuals(
    p,
    q,
    tokens,
    sums,
    nodes,
    vocabulary,
    pieces,
    is_drawn: tl.constexpr,
    block: tl.constexpr,
):
    """Sum max(P p - q, 0), and p, over a piece of the vocabulary at an inner place, `[rows, nodes - 1, 2, pieces]`."""
    inner = tl.program_id(0).to(tl.int64)
    row, place, piece = inner // (nodes - 1), inner % (nodes - 1) + 1, tl.program_id(1)
    own, drawn, tokens = p + row * (nodes + 1) * vocabulary, q + row * nodes * vocabulary, tokens + row * nodes
    weight = 1.0
    for node in range(place):
        weight = tl.minimum(weight * _ratio(own, drawn, tokens, node, vocabulary, is_drawn), 1.0)
    token = piece * block + tl.arange(0, block)
    inside = token < vocabulary
    here = tl.load(own + place * vocabulary + token, mask=inside, other=0.0)
    taken = _q_of(drawn, tokens, place, vocabulary, token, inside, is_drawn)
    left = tl.where(inside, tl.maximum(weight * here - taken, 0.0), 0.0)
    tl.store(sums + 2 * inner * pieces + piece, tl.sum(left, 0))
    tl.store(sums + (2 * inner + 1) * pieces + piece, tl.sum(here, 0))


@triton.jit
def judge_rows(
    p,
    q,
    tokens,
    uniform,
    judged,
    noise,
    sums,
    found,
    chosen,
    verdict,
    nodes,
    vocabulary,
    pieces,
    by_block: tl.constexpr,
    is_drawn: tl.constexpr,
    is_sampled: tl.constexpr,
    is_cut: tl.constexpr,
    block: tl.constexpr,
    most_pieces: tl.constexpr,
):
    """Judge the chain of a row, and race for the token after it in a piece of the vocabulary; see `judge_chain`.

    `is_drawn`: q is read, else it is one-hot. `is_sampled`: `uniform` and `noise` are read; else all chances are 0 and
    1, and the likeliest token follows. `is_cut`: `judged` is read; `by_block`: `sums` are. Writes the accepted tokens
    to `verdict`; the best score of what is left of p, of p itself, and the most that is left to `found`, `[rows, 3,
    pieces]`; the tokens of the first two to `chosen`, `[rows, 2, pieces]`.
    """
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own, drawn, tokens = p + row * (nodes + 1) * vocabulary, q + row * nodes * vocabulary, tokens + row * nodes
    uniform, judged = uniform + row * nodes, judged + row * nodes
    accepted, stands, weight, reached = 0, True, 1.0, 1.0
    for node in range(nodes):
        ratio = _ratio(own, drawn, tokens, node, vocabulary, is_drawn)
        chance = ratio
        if by_block:
            weight = tl.minimum(weight * ratio, 1.0)
            chance = weight
            if node + 1 < nodes:
                part = tl.arange(0, most_pieces)
                at = sums + 2 * (row * (nodes - 1) + node) * pieces + part
                left = tl.sum(tl.load(at, mask=part < pieces, other=0.0), 0)
                mass = tl.sum(tl.load(at + pieces, mask=part < pieces, other=0.0), 0)
                after = tl.where(left > 0.0, left / (left + (1.0 - weight)), tl.where(weight == 1.0, 1.0, 0.0))
                chance = tl.where(mass > 0.0, after, weight)
        within = tl.load(uniform + node) if is_sampled else 0.5
        is_within = within < chance.to(tl.float64)
        if is_cut:
            is_within = is_within & (tl.load(judged + node) != 0)
        if by_block:
            # The deepest node whose draw is within its chance.
            accepted = tl.where(is_within, node + 1, accepted)
            reached = tl.where(is_within, weight, reached)
        else:
            stands = stands & is_within
            accepted += stands.to(tl.int32)
    child = tl.minimum(accepted, nodes - 1)
    token = piece * block + tl.arange(0, block)
    inside = token < vocabulary
    score = tl.load(own + accepted * vocabulary + token, mask=inside, other=0.0)
    taken = _q_of(drawn, tokens, child, vocabulary, token, inside, is_drawn)
    left = tl.where(inside, tl.maximum(reached * score - taken, 0.0), 0.0)
    # After the last node nothing is taken.
    most_left = tl.where(accepted == nodes, 0.0, tl.max(left, 0))
    if is_sampled:
        luck = tl.load(noise + row * vocabulary + token, mask=inside, other=1.0)
        score, left = tl.div_rn(score, luck), tl.div_rn(left, luck)
    score, left = tl.where(inside, score, float("-inf")), tl.where(inside, left, float("-inf"))
    best, best_left = tl.max(score, 0), tl.max(left, 0)
    here = 3 * row * pieces + piece
    tl.store(found + here, best_left)
    tl.store(found + here + pieces, best)
    tl.store(found + here + 2 * pieces, most_left)
    here = 2 * row * pieces + piece
    tl.store(chosen + here, tl.min(tl.where(left == best_left, token, vocabulary), 0))
    tl.store(chosen + here + pieces, tl.min(tl.where(score == best, token, vocabulary), 0))
    if piece == 0:
        tl.store(verdict + 2 * row, accepted)


@triton.jit
def choose_rows(found, chosen, verdict, vocabulary, pieces, most_pieces: tl.constexpr):
    """Write the token after the accepted ones: the best of all pieces, of what is left of p, or of p if nothing is."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, most_pieces)
    inside = part < pieces
    here = found + 3 * row * pieces + part
    left = tl.load(here, mask=inside, other=float("-inf"))
    whole = tl.load(here + pieces, mask=inside, other=float("-inf"))
    most = tl.load(here + 2 * pieces, mask=inside, other=0.0)
    is_empty = tl.max(most, 0) == 0.0
    at = chosen + 2 * row * pieces + part
    tokens = tl.where(is_empty, tl.load(at + pieces, mask=inside, other=0), tl.load(at, mask=inside, other=0))
    score = tl.where(is_empty, whole, left)
    tl.store(verdict + 2 * row + 1, tl.min(tl.where(score == tl.max(score, 0), tokens, vocabulary), 0))


def judge_chain(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    uniform: Tensor | None,
    judged: Tensor | None,
    noise: Tensor | None,
    by: str = "token",
) -> Tensor:
    """Judge a chain, `by` a rule, and draw the token after it: number of accepted tokens and that token, `[rows, 2]`.

    `p` is `[rows, nodes + 1, vocabulary]` and `q` `[rows, nodes, vocabulary]`, float32; None: q is one-hot at `tokens`.
    `uniform`, `[rows, nodes]`, float64, accepts tokens, and `noise`, unit exponentials above 0, `[rows, vocabulary]`,
    float32, draws the next; both None: all chances are 0 and 1. `judged` says which nodes are judged, q of the others
    is 0; None: all.
    """
    (rows, nodes), vocabulary = tokens.shape, p.shape[-1]
    p, q, tokens = p.contiguous(), None if q is None else q.contiguous(), tokens.contiguous()
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    pieces = triton.cdiv(vocabulary, block)
    verdict, chosen = tokens.new_empty(rows, 2), tokens.new_empty(rows, 2, pieces)
    found, sums = p.new_empty(rows, 3, pieces), p.new_empty(rows, max(nodes - 1, 1), 2, pieces)
    # Arguments that are None are not read.
    drawn = p if q is None else q
    luck, race = (tokens if each is None else each.contiguous() for each in (uniform, noise))
    cut = tokens if judged is None else judged.contiguous().view(torch.uint8)
    counts = nodes, vocabulary, pieces
    most = {"most_pieces": triton.next_power_of_2(pieces)}
    size = {"is_drawn": q is not None, "block": block}
    how = {"by_block": by == "block", "is_sampled": uniform is not None, "is_cut": judged is not None}
    # Products are rounded before q is taken from them, as torch rounds them.
    launch = {"num_warps": 8, "enable_fp_fusion": False}
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(p):
        if by == "block" and nodes > 1:
            sum_residuals[rows * (nodes - 1), pieces](p, drawn, tokens, sums, *counts, **size, **launch)
        given = p, drawn, tokens, luck, cut, race, sums, found, chosen, verdict, *counts
        judge_rows[rows, pieces](*given, **how, **size, **most, **launch)
        choose_rows[rows,](found, chosen, verdict, vocabulary, pieces, **most, **launch)
    return verdict


def tried_verdict(given: Given, by: str, stock: Callable[[], Tensor]) -> Tensor:
    """Judge by `judge_chain` of its first arguments, or `stock`, the same by torch, if the kernel is not trusted."""
    p, q, _, uniform, judged, _ = given
    kind = (p.device, p.dtype, q is None, uniform is None, judged is None, by)
    return _TRIAL.run(kind, lambda: judge_chain(*given, by), stock, most=0.0)
