"""Texts compared with the model's own: where they part, and how nearly tied their tokens were there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Any

from selfspec.measure.rounding import Bound


class Check(StrEnum):
    """What was compared."""

    FREE_RUNNING = "free-running"
    TEACHER_FORCED = "teacher-forced"
    COUPLED = "coupled"
    PLAIN = "beside plain decoding"


@dataclass(frozen=True)
class Divergence:
    """One place where tokens are not equal.

    Attributes:
        rule: which acceptance rule; None where nothing was accepted or rejected.
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


@dataclass
class Comparison:
    """Texts compared with the model's own under a rule; None where nothing is accepted or rejected."""

    check: Check
    draft: str
    rule: str | None = None
    texts: int = 0
    tokens: int = 0
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def equal_texts(self) -> int:
        """Texts without any difference, where each is compared until it parts."""
        return self.texts - len(self.divergences)

    @property
    def equal_tokens(self) -> int:
        """Tokens that are the model's own."""
        return self.tokens - len(self.divergences)

    def add(self, prompt: int, expected: Sequence[int], found: Sequence[int], gap: Callable[[int], float]) -> None:
        """Compare one more text, token by token: until it parts, or where the text is forced, to the end.

        `gap` is asked for the gap at an index where they differ, if both have a token there.
        """
        self.texts += 1
        for position, (own, other) in enumerate(zip_longest(expected, found)):
            self.tokens += 1
            if own != other:
                tie = None if own is None or other is None else gap(position)
                self.divergences.append(
                    Divergence(self.check, self.draft, self.rule, prompt, position, own, other, tie)
                )
                if self.check is not Check.TEACHER_FORCED:
                    return

    def to_dict(self) -> dict[str, int]:
        """Counts, ready for JSON. Divergences are listed by the report."""
        return {"texts": self.texts, "equal_texts": self.equal_texts, "tokens": self.tokens}
