"""Whether an arm's greedy texts are those of `model.generate`, and what may excuse them where they are not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from selfspec.measure.rounding import Bound, tie_gap, widths_of
from selfspec.measure.stock import bare, read_reference, stepwise_logits

_HALF = (torch.float16, torch.bfloat16)
# Widths of the passes whose rounding is measured: no arm's blocks are much wider.
_BLOCK = 10


@dataclass(frozen=True)
class TextAgreement:
    """An arm's greedy texts beside those of `model.generate`.

    Attributes:
        texts: distinct pairs of texts that were compared.
        equal: how many are equal, token for token.
        widest_gap: where texts part, the widest gap between the logits of the two tokens; None where none part, or in
            float32 and float64, where no gap is an excuse.
        near_tie: the widest gap that rounding explains, measured on the texts that part; None as above.
    """

    texts: int
    equal: int
    widest_gap: float | None = None
    near_tie: float | None = None

    @property
    def refused(self) -> bool:
        """Whether the arm may not be scored: its texts differ by more than half precision's rounding explains."""
        if self.equal == self.texts:
            return False
        return self.widest_gap is None or self.near_tie is None or self.widest_gap > self.near_tie


class Pair(NamedTuple):
    """A prompt, its new tokens by `model.generate`, and those by an arm."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]
    found: tuple[int, ...]


def compare(model: PreTrainedModel, pairs: Iterable[Pair]) -> TextAgreement:
    """Compare an arm's greedy texts with those of `model.generate`; the same pair counts once."""
    distinct = list(dict.fromkeys(pairs))
    parted = [pair for pair in distinct if pair.expected != pair.found]
    texts, equal = len(distinct), len(distinct) - len(parted)
    # Where texts part one may end sooner; one that only stops early is not the other up to rounding.
    cut = any(_parting(pair) is None for pair in parted)
    if not parted or cut or model.dtype not in _HALF:
        return TextAgreement(texts, equal)
    bound, gaps = Bound(widths_of(_BLOCK)), []
    stock = bare(model)
    stock.generation_config.eos_token_id = None
    for pair in parted:
        prompt = torch.tensor([pair.prompt], device=model.device)
        bound.measure(model, read_reference(stock, prompt, len(pair.expected)))
        # How far the two tokens where the texts part are from a tie, by the model's own one-token passes.
        place = _parting(pair)
        assert place is not None
        logits = stepwise_logits(model, prompt, pair.expected[: place + 1])[-1]
        gaps.append(tie_gap(logits, pair.expected[place], pair.found[place]))
    return TextAgreement(texts, equal, max(gaps), bound.near_tie)


def _parting(pair: Pair) -> int | None:
    """The place of the first token that differs; None: one text is the beginning of the other."""
    both = enumerate(zip(pair.expected, pair.found, strict=False))
    return next((index for index, (one, other) in both if one != other), None)
