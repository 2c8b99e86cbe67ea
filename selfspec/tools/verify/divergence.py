"""Where two texts part, and how nearly tied their tokens were there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from selfspec.measure.rounding import Bound


class Check(StrEnum):
    """What was compared."""

    FREE_RUNNING = "free-running"
    TEACHER_FORCED = "teacher-forced"
    COUPLED = "coupled"


@dataclass(frozen=True)
class Divergence:
    """One place where tokens are not equal.

    Attributes:
        check: what was compared.
        draft: which draft.
        rule: which acceptance rule; None where nothing was accepted or rejected.
        prompt: index of the prompt.
        position: index of the new token.
        expected: the model's own token; None where its text had ended.
        found: the token in its place; None where the text had ended.
        gap: how far the two are from a tie, in logits; None where one of them is missing. In greedy decoding the
            difference of their logits, which is the model's top-2 gap where `found` is its second choice. In coupled
            sampling what one of the logits would have to rise by for the noise to choose the other.
    """

    check: Check
    draft: str
    rule: str | None
    prompt: int
    position: int
    expected: int | None
    found: int | None
    gap: float | None

    def is_near_tie(self, bound: Bound) -> bool:
        """Whether rounding explains it."""
        return self.gap is not None and self.gap <= bound.near_tie

    def to_dict(self, bound: Bound) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {**asdict(self), "near_tie": self.is_near_tie(bound)}


@dataclass(frozen=True)
class Agreement:
    """Texts compared until each parts, if it does.

    Attributes:
        texts: how many.
        tokens: compared, of all texts.
        divergences: at most one for each text.
    """

    texts: int
    tokens: int
    divergences: tuple[Divergence, ...]

    @property
    def equal_texts(self) -> int:
        """Texts without any difference."""
        return self.texts - len(self.divergences)

    def to_dict(self) -> dict[str, int]:
        """Counts, ready for JSON. Divergences are listed by the report."""
        return {"texts": self.texts, "equal_texts": self.equal_texts, "tokens": self.tokens}

    @classmethod
    def together(cls, parts: Sequence[Agreement]) -> Agreement:
        """Several as one."""
        return cls(
            texts=sum(part.texts for part in parts),
            tokens=sum(part.tokens for part in parts),
            divergences=tuple(divergence for part in parts for divergence in part.divergences),
        )


def compare(
    expected: Sequence[int],
    found: Sequence[int],
    check: Check,
    draft: str,
    rule: str,
    prompt: int,
    gap: Callable[[int], float],
) -> Agreement:
    """Compare two texts, token by token.

    Args:
        expected: the model's own new tokens.
        found: those to compare.
        check: what is compared.
        draft: which draft.
        rule: which acceptance rule.
        prompt: index of the prompt.
        gap: asked for the gap at the index where they part, if both have a token there.
    """
    longest = max(len(expected), len(found))
    pairs = [(_at(expected, index), _at(found, index)) for index in range(longest)]
    parted = next((index for index, (own, other) in enumerate(pairs) if own != other), None)
    if parted is None:
        return Agreement(1, longest, ())
    own, other = pairs[parted]
    tie = None if own is None or other is None else gap(parted)
    return Agreement(1, parted + 1, (Divergence(check, draft, rule, prompt, parted, own, other, tie),))


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None
