"""Accept and reject draft tokens: draw by the chances that a rule of `selfspec.accept` gives.

Drafts that are judged whole and drafts that are judged place by place share this code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.accept import Rule
from selfspec.decode.batch import Batch
from selfspec.decode.noise import Purpose
from selfspec.draft import Draft
from selfspec.kernels.trial import runs_triton


@dataclass(frozen=True)
class Effective:
    """The distributions that a rule judges.

    Attributes:
        draft: the draft; without probs if its tokens were not drawn.
        p: the target's distributions, `[rows, nodes + 1, vocab]`. Zeros where they are not finite, so that every draft
            token is rejected.
        overlap: 1 - TV(p, q) at each draft token of a coupled chain, `[rows, nodes]`; `[rows, 0]` for other drafts.
    """

    draft: Draft
    p: Tensor
    overlap: Tensor


def effective(batch: Batch, draft: Draft, p: Tensor, finite: Tensor, positions: Tensor) -> Effective:
    """Return the distributions that tokens are actually chosen from.

    Coupled decoding chooses the token of each position with noise that draft and target share; greedy decoding takes
    the likeliest token. Then nothing is drawn, and the rule judges one-hot distributions: q at the draft's tokens and p
    at the target's choice. Judging a coupled draft by its real q would be exact, but would reject tokens on which draft
    and target agree.

    For coupled chains the overlap of p and q, 1 - TV(p, q) = the sum of min(p, q), is recorded as a diagnostic: it is
    the best acceptance rate of any rule.

    Args:
        batch: gives sampling and noise.
        draft: with the probs that its tokens were chosen from.
        p: as the target's scores give it, `[rows, places, vocab]`.
        finite: whether p is finite, `[rows, places]`.
        positions: of the tokens to be chosen, `[rows or 1, places]`.
    """
    sampling = batch.sampling
    decided = torch.where(finite[..., None], sampling.decide(p, positions, batch.noise), 0.0)
    if not sampling.decided:
        return Effective(sampling.judged(draft), decided, p.new_empty(len(p), 0))
    overlap = p.new_empty(len(p), 0)
    if draft.probs is not None and draft.tree.is_chain:
        overlap = torch.minimum(p[:, : draft.length], draft.probs).sum(-1)
    return Effective(sampling.judged(draft), decided, overlap)


def accept(
    batch: Batch, seen: Effective, logits: Tensor, rule: Rule, judged: Tensor | None = None, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Accept draft tokens, and draw the token after them.

    Args:
        batch: gives sampling and noise.
        seen: the distributions that the rule judges.
        logits: the target's own, `[rows, nodes + 1, vocab]`.
        rule: gives the chances.
        judged: whether each node is judged in each row, `[rows, nodes]`; None: all are.
        first: number of the first of these nodes in the whole draft.

    Returns:
        The place of the deepest accepted node, 0 for none, `[rows]`; and the token after it, drawn from the residual or
        the bonus token, `[rows]`.
    """

    def by_rule() -> tuple[Tensor, Tensor]:
        if len(seen.draft.tree):
            mask = _drawn_mask(batch, rule, rule.accept_probs(seen.draft, seen.p, logits), first)
            if judged is not None:
                mask &= judged
            place = rule.accepted(mask, seen.draft.tree)
            recovery_probs = rule.recovery_probs(seen.draft, seen.p, place)
        else:
            # Plain decoding: there is nothing to judge, and the token is drawn from p.
            place, recovery_probs = seen.draft.tokens.new_zeros(len(seen.p)), seen.p[:, 0]
        # A row commits one such token per round, so all of them use the noise of one place.
        token = batch.sampling.draw(recovery_probs[:, None], batch.noise, Purpose.RECOVER)[:, 0]
        return place, token

    tree, declared = seen.draft.tree, vars(type(rule)).get("declared")
    if declared is not None and declared.by_kernel and len(tree) and tree.is_chain and runs_triton(seen.p.device):
        place, token = _by_triton(batch, seen, judged, first, lambda: torch.stack(by_rule(), 1)).unbind(1)
        return place, token
    return by_rule()


def _by_triton(batch: Batch, seen: Effective, judged: Tensor | None, first: int, stock: Callable[[], Tensor]) -> Tensor:
    """Judge a chain by a token-level rule in one launch; return the two results of `accept` as `[rows, 2]`."""
    from selfspec.kernels.triton_judge import tried_verdict

    draft, uniform, noise = seen.draft, None, None
    if not batch.sampling.decided:
        uniform = batch.noise.uniform(Purpose.ACCEPT, first, draft.length)
        noise = batch.noise.race(seen.p[:, :1], Purpose.RECOVER)[:, 0]
    return tried_verdict(seen.p, draft.probs, draft.tokens, uniform, judged, noise, stock)


def _drawn_mask(batch: Batch, rule: Rule, accept_probs: Tensor, first: int) -> Tensor:
    """Draw whether each draft token is accepted, `[rows, nodes]`."""
    if batch.sampling.decided and rule.lossless:
        # Nothing is drawn: the chances of a lossless rule are 0 and 1.
        return accept_probs > 0.5
    return batch.noise.uniform(Purpose.ACCEPT, first, accept_probs.shape[1]) < accept_probs
