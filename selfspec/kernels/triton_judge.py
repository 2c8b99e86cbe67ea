"""Judge drafts token by token or as a block on a CUDA device, in Triton.

Of chains, pieces of the vocabulary are looked at beside each other. Of trees a program looks at all of a row, one child
after the other, since each is judged against what its earlier siblings leave.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.trial import Trial

# Tokens that a program processes together.
_BLOCK = 4096
_TRIAL = Trial("judging of drafts")

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


@triton.jit
def _reject(
    source,
    into,
    total,
    weight,
    drawn,
    tokens,
    child,
    vocabulary,
    is_drawn: tl.constexpr,
    block: tl.constexpr,
):
    """Write max(P p - q, 0) to `into`, where p is `source` over `total`; return the sums of both."""
    rest, mass = 0.0, 0.0
    for start in range(0, vocabulary, block):
        token = start + tl.arange(0, block)
        inside = token < vocabulary
        here = tl.div_rn(tl.load(source + token, mask=inside, other=0.0), total)
        taken = _q_of(drawn, tokens, child, vocabulary, token, inside, is_drawn)
        residual = tl.where(inside, tl.maximum(weight * here - taken, 0.0), 0.0)
        tl.store(into + token, residual, mask=inside)
        rest += tl.sum(residual, 0)
        mass += tl.sum(here, 0)
    # Others read what a thread wrote.
    tl.debug_barrier()
    return rest, mass


@triton.jit
def judge_tree_rows(
    p,
    q,
    tokens,
    uniform,
    judged,
    noise,
    children,
    turns,
    weights,
    left,
    verdict,
    nodes,
    widest,
    vocabulary,
    by_block: tl.constexpr,
    is_drawn: tl.constexpr,
    is_sampled: tl.constexpr,
    is_cut: tl.constexpr,
    block: tl.constexpr,
):
    """Judge the tree of a row, and draw the token after the accepted path; see `judge_tree`.

    `weights`, `[rows, 2, nodes + 1]`, are those of places before and after their children are judged, and `left`,
    `[rows, 2, vocabulary]`, is what rejected children leave of p. The constants are as in `judge_rows`.
    """
    row = tl.program_id(0).to(tl.int64)
    own, drawn, tokens = p + row * (nodes + 1) * vocabulary, q + row * nodes * vocabulary, tokens + row * nodes
    uniform, judged = uniform + row * nodes, judged + row * nodes
    weights, left = weights + row * 2 * (nodes + 1), left + row * 2 * vocabulary
    accepted, one = row * 0, row.to(tl.float32) * 0.0 + 1.0
    if by_block:
        tl.store(weights, 1.0)
        tl.debug_barrier()
        for place in range(nodes + 1):
            weight = tl.load(weights + place)
            total, at, rank = one, row * 0 - 1, row * 0
            child = tl.load(children + place * widest)
            while child >= 0:
                token = tl.load(tokens + child)
                # What rejected siblings leave of p; nothing was taken yet where `at` is -1.
                here = tl.where(at < 0, own + place * vocabulary, left + at * vocabulary)
                ratio = tl.div_rn(tl.load(here + token), total)
                if is_drawn:
                    ratio = tl.div_rn(ratio, tl.load(drawn + child * vocabulary + token))
                    ratio = tl.minimum(ratio, 3.4028234663852886e38)
                tl.store(weights + child + 1, tl.minimum(weight * ratio, 1.0))
                rest, mass = _reject(
                    here,
                    left + (at == 0) * vocabulary,
                    total,
                    weight,
                    drawn,
                    tokens,
                    child,
                    vocabulary,
                    is_drawn,
                    block,
                )
                after = tl.where(rest > 0.0, rest / (rest + (1.0 - weight)), tl.where(weight == 1.0, 1.0, 0.0))
                weight = tl.where(mass > 0.0, after, weight)
                at = tl.where(rest > 0.0, (at == 0).to(tl.int64), at)
                total = tl.where(rest > 0.0, rest, total)
                rank += 1
                child = tl.load(children + place * widest + rank, mask=rank < widest, other=-1)
            tl.store(weights + nodes + 1 + place, weight)
            tl.debug_barrier()
        for turn in range(nodes):
            node = tl.load(turns + nodes - turn)
            within = tl.load(uniform + node - 1) if is_sampled else 0.5
            stands = within < tl.load(weights + nodes + 1 + node).to(tl.float64)
            if is_cut:
                stands = stands & (tl.load(judged + node - 1) != 0)
            accepted = tl.where(stands & (accepted == 0), node, accepted)
    weight = tl.load(weights + accepted) if by_block else 1.0
    total, at, rank = one, row * 0 - 1, row * 0
    child = tl.load(children + accepted * widest)
    while child >= 0:
        here = tl.where(at < 0, own + accepted * vocabulary, left + at * vocabulary)
        stands = child < 0
        if not by_block:
            token = tl.load(tokens + child)
            chance = tl.div_rn(tl.load(here + token), total)
            if is_drawn:
                chance = tl.div_rn(chance, tl.load(drawn + child * vocabulary + token))
            within = tl.load(uniform + child) if is_sampled else 0.5
            stands = within < chance.to(tl.float64)
            if is_cut:
                stands = stands & (tl.load(judged + child) != 0)
        if stands:
            accepted = child + 1
            total, at, rank = one, row * 0 - 1, row * 0
        else:
            rest, mass = _reject(
                here,
                left + (at == 0) * vocabulary,
                total,
                weight,
                drawn,
                tokens,
                child,
                vocabulary,
                is_drawn,
                block,
            )
            if by_block:
                after = tl.where(rest > 0.0, rest / (rest + (1.0 - weight)), tl.where(weight == 1.0, 1.0, 0.0))
                weight = tl.where(mass > 0.0, after, weight)
            at = tl.where(rest > 0.0, (at == 0).to(tl.int64), at)
            total = tl.where(rest > 0.0, rest, total)
            rank += 1
        child = tl.load(children + accepted * widest + rank, mask=rank < widest, other=-1)
    here = tl.where(at < 0, own + accepted * vocabulary, left + at * vocabulary)
    best, chosen = float("-inf"), row * 0
    for start in range(0, vocabulary, block):
        token = start + tl.arange(0, block)
        inside = token < vocabulary
        score = tl.div_rn(tl.load(here + token, mask=inside, other=0.0), total)
        if is_sampled:
            score = tl.div_rn(score, tl.load(noise + row * vocabulary + token, mask=inside, other=1.0))
        score = tl.where(inside, score, float("-inf"))
        most = tl.max(score, 0)
        first = tl.min(tl.where(score == most, token, vocabulary), 0)
        chosen = tl.where(most > best, first.to(tl.int64), chosen)
        best = tl.maximum(best, most)
    tl.store(verdict + 2 * row, accepted)
    tl.store(verdict + 2 * row + 1, chosen)


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


def judge_tree(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    uniform: Tensor | None,
    judged: Tensor | None,
    noise: Tensor | None,
    by: str,
    children: Tensor,
    turns: Tensor,
) -> Tensor:
    """Judge a tree as `judge_chain` does a chain: the deepest accepted place and the token after it, `[rows, 2]`.

    `children` are those of each place in order, -1 after the last, `[nodes + 1, most children]`; `turns` the place that
    is judged with each turn, the last first, as a block, `[nodes + 1]`.
    """
    (rows, nodes), vocabulary = tokens.shape, p.shape[-1]
    p, q, tokens = p.contiguous(), None if q is None else q.contiguous(), tokens.contiguous()
    luck, race = (tokens if each is None else each.contiguous() for each in (uniform, noise))
    cut = tokens if judged is None else judged.contiguous().view(torch.uint8)
    verdict, weights = tokens.new_empty(rows, 2), p.new_empty(rows, 2, nodes + 1)
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(p):
        judge_tree_rows[rows,](
            *(p, p if q is None else q, tokens, luck, cut, race, children, turns, weights),
            *(p.new_empty(rows, 2, vocabulary), verdict, nodes, children.shape[1], vocabulary),
            by_block=by == "block",
            is_drawn=q is not None,
            is_sampled=uniform is not None,
            is_cut=judged is not None,
            block=min(_BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=16,
            enable_fp_fusion=False,
        )
    return verdict


def tried_verdict(
    given: Given, by: str, stock: Callable[[], Tensor], tree: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Judge by `judge_chain` or `judge_tree` of its first arguments, or `stock`, the same by torch, if not trusted.

    `tree` are the last two arguments of `judge_tree`; None: the draft is a chain.
    """
    p, q, _, uniform, judged, _ = given
    kind = (p.device, p.dtype, q is None, uniform is None, judged is None, by, tree is None)
    kernel = partial(judge_chain, *given, by) if tree is None else partial(judge_tree, *given, by, *tree)
    return _TRIAL.run(kind, kernel, stock, most=0.0)
