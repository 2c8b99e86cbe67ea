"""Measure how far rounding moves logits: the model's own one-token passes against its passes over several tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.measure.stock import Reference, blockwise_logits

# A margin: passes that resume from given states round elsewhere than those measured, and the largest of many
# differences varies from run to run.
_SAFETY = 2
# How many times the bound a logit may be off, where no token is chosen by it, before it counts as an error.
_BEYOND_ROUNDING = 8
# Roundings of the largest logit: more than the layers of any model add up to.
_MOST_ROUNDINGS = 256
_QUANTILE = 0.99
# Where rounding can decide more than this share of the tokens, calling two texts nearly tied says little.
_MOST_CLOSE_CALLS = 0.5
# TensorFloat-32 keeps ten bits after the leading one.
_TF32_EPS = 2.0**-10


class Bound:
    """Bounds what rounding explains, as measured on this model, device and dtype; all in logits.

    The model's passes over one token are compared with its passes over several, on reference texts. At each position
    the largest difference over the vocabulary counts.

    Attributes:
        rounding: what rounding the largest logit once may change. The bound is never taken to be less.
        moved: the largest difference of any logit, at each position compared.
        gap_moved: the change of the gap between the two likeliest tokens there.
        gaps: that gap itself, at each position of the texts.
    """

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.widths = widths
        self.rounding = 0.0
        self.moved, self.gap_moved, self.gaps = torch.empty(0), torch.empty(0), torch.empty(0)

    def measure(self, model: PreTrainedModel, reference: Reference) -> None:
        """Take a text into account."""
        single = reference.logits.float()
        likeliest = single.topk(2, -1).indices
        gap = _gap(single, likeliest)
        self.gaps = torch.cat([self.gaps, gap.cpu()])
        largest = single.nan_to_num(0, 0, 0).abs().max().item()
        self.rounding = max(self.rounding, _precision(reference.logits) * largest)
        for width in self.widths:
            several = blockwise_logits(model, reference.prompt, reference.tokens, width).float()
            self.moved = torch.cat([self.moved, largest_difference(several, single).cpu()])
            self.gap_moved = torch.cat([self.gap_moved, (_gap(several, likeliest) - gap).abs().cpu()])

    @property
    def largest(self) -> float:
        """Largest difference of any logit."""
        return self.moved.max().item()

    @property
    def gap_largest(self) -> float:
        """Largest change of the gap between the two likeliest tokens."""
        return self.gap_moved.max().item()

    @property
    def near_tie(self) -> float:
        """Widest gap between two logits that rounding may close: twice the largest change of one."""
        return _SAFETY * max(self.gap_largest, self.rounding)

    @property
    def most_off(self) -> float:
        """Largest difference of a logit that may still be called rounding."""
        return _BEYOND_ROUNDING * max(self.largest, self.rounding)

    @property
    def close_calls(self) -> int:
        """Number of positions of the reference texts at which the two likeliest tokens are nearly tied."""
        return int((self.gaps.double() <= self.near_tie).sum())

    @property
    def is_rounding(self) -> bool:
        """True if the differences are small, and leave most of the text decided."""
        decided = self.close_calls <= _MOST_CLOSE_CALLS * len(self.gaps)
        return decided and self.largest <= _MOST_ROUNDINGS * self.rounding

    def to_dict(self) -> dict[str, Any]:
        return {
            "widths": list(self.widths),
            "positions": len(self.moved),
            "logits_largest": self.largest,
            "logits_quantile_99": self.moved.quantile(_QUANTILE).item(),
            "gap_change_largest": self.gap_largest,
            "gap_change_quantile_99": self.gap_moved.quantile(_QUANTILE).item(),
            "rounding": self.rounding,
            "near_tie": self.near_tie,
            "most_off": self.most_off,
            "close_calls": self.close_calls,
            "reference_positions": len(self.gaps),
        }


def widths_of(draft_length: int) -> tuple[int, ...]:
    """Return the widths to measure for a draft length: the narrowest and the widest block of a verification pass."""
    return tuple(sorted({2, draft_length + 1}))


def largest_difference(logits: Tensor, others: Tensor) -> Tensor:
    """Return the largest difference over the vocabulary at each position, `[tokens]`, of logits `[tokens, vocab]`."""
    # Two infinities of a sign do not differ; a NaN differs from all, by as much as a number can say.
    difference = torch.where(logits == others, 0.0, (logits - others).abs())
    return difference.nan_to_num(nan=torch.finfo(difference.dtype).max).amax(-1)


def _precision(logits: Tensor) -> float:
    """Return the relative size of one rounding, as the device does it."""
    if logits.dtype == torch.float32 and logits.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        return _TF32_EPS
    # Tokens are chosen from float32 logits, whatever the model computes in.
    return max(torch.finfo(logits.dtype).eps, torch.finfo(torch.float32).eps)


def _gap(logits: Tensor, pair: Tensor) -> Tensor:
    scores = logits.gather(-1, pair)
    return scores[:, 0] - scores[:, 1]


def tie_gap(logits: Tensor, first: int, second: int) -> float:
    """Return how far the logits of two tokens differ, in logits `[vocab]`."""
    return abs((logits[first].float() - logits[second].float()).item())
