"""Whether an arm's greedy texts are those of `model.generate`, and what may excuse them where they are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
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

    @property
    def share(self) -> float:
        """Share of equal texts."""
        return self.equal / self.texts

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "refused": self.refused}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> TextAgreement:
        """Read back from JSON."""
        return cls(found["texts"], found["equal"], found["widest_gap"], found["near_tie"])


@dataclass(frozen=True)
class Pair:
    """A text of `model.generate` and an arm's own.

    Attributes:
        prompt: `[1, prompt]`.
        expected: new tokens of `model.generate`.
        found: those of the arm.
    """

    prompt: Tensor
    expected: Sequence[int]
    found: Sequence[int]

    @property
    def equal(self) -> bool:
        """Whether they are the same."""
        return list(self.expected) == list(self.found)


def compare(model: PreTrainedModel, pairs: Sequence[Pair]) -> TextAgreement:
    """Compare an arm's greedy texts with those of `model.generate`."""
    parted = [pair for pair in pairs if not pair.equal]
    equal = len(pairs) - len(parted)
    whole = all(len(pair.expected) == len(pair.found) for pair in parted)
    if not parted or not whole or model.dtype not in _HALF:
        return TextAgreement(len(pairs), equal)
    bound = Bound(widths_of(_BLOCK))
    stock = bare(model)
    stock.generation_config.eos_token_id = None
    for pair in parted:
        bound.measure(model, read_reference(stock, pair.prompt, len(pair.expected)))
    return TextAgreement(len(pairs), equal, max(_gap(model, pair) for pair in parted), bound.near_tie)


def _gap(model: PreTrainedModel, pair: Pair) -> float:
    """How far the two tokens where the texts part are from a tie, by the model's own one-token passes."""
    tokens = zip(pair.expected, pair.found, strict=True)
    place, (expected, found) = next((index, two) for index, two in enumerate(tokens) if two[0] != two[1])
    return tie_gap(stepwise_logits(model, pair.prompt, pair.expected[: place + 1])[-1], expected, found)
