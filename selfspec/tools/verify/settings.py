"""What a verification is to do, checked."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.accept import find_rule
from selfspec.errors import DraftConfigError, UnsupportedOptionError

_FEWEST_SAMPLES = 100


@dataclass(frozen=True)
class Settings:
    """How much is verified, and how strictly.

    Attributes:
        accept: names of the acceptance rules. Greedy decoding is verified under the first, and under every one that is
            not lossless.
        max_new_tokens: length of each text, in tokens.
        draft_length: tokens drafted each round.
        samples: texts drawn for each test of goodness of fit, at least 100.
        level: of significance, of all tests together (family-wise).
        seed: of all that is drawn, 0 .. 2**63 - 1.

    Raises:
        UnsupportedOptionError, DraftConfigError: a value out of range, or a rule that is not known or named twice.
    """

    accept: tuple[str, ...] = ("token", "block", "coupled")
    max_new_tokens: int = 64
    draft_length: int = 4
    samples: int = 400
    level: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.accept:
            find_rule(name)
        if not self.accept or len(set(self.accept)) < len(self.accept):
            raise UnsupportedOptionError(f"name each acceptance rule once, and at least one; got {list(self.accept)}")
        if self.max_new_tokens < 2:
            raise UnsupportedOptionError(f"max_new_tokens must be at least 2 to draft any, got {self.max_new_tokens}")
        if self.draft_length < 1:
            raise DraftConfigError(f"draft length must be at least 1, got {self.draft_length}")
        if self.samples < _FEWEST_SAMPLES:
            raise UnsupportedOptionError(
                f"samples must be at least {_FEWEST_SAMPLES} for a test of fit, got {self.samples}"
            )
        if not 0 < self.level < 1:
            raise UnsupportedOptionError(f"the level of significance must be between 0 and 1, got {self.level}")
        if not 0 <= self.seed < 2**63:
            raise UnsupportedOptionError(f"the seed must be from 0 to 2**63 - 1, got {self.seed}")

    @property
    def greedy_rules(self) -> tuple[str, ...]:
        """The rules under which greedy decoding is verified. Under lossless ones it is the same computation."""
        first, *others = self.accept
        return (first, *(name for name in others if not find_rule(name).lossless))

    @property
    def coupled_rules(self) -> tuple[str, ...]:
        """The rules whose tokens, at equal seeds, do not depend on the draft."""
        return tuple(name for name in self.accept if find_rule(name).couples)

    @property
    def sampled_rules(self) -> tuple[str, ...]:
        """The rules under which every draft has a sampled distribution of its own."""
        return tuple(name for name in self.accept if not find_rule(name).couples)

    @property
    def lossless(self) -> bool:
        """Whether all rules are."""
        return all(find_rule(name).lossless for name in self.accept)
