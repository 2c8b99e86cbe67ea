"""Settings of a verification. Each field is also an option of `selfspec verify`, and its help describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from selfspec.arguments import shown
from selfspec.errors import UnsupportedOptionError
from selfspec.measure.settings import check_numbers

if TYPE_CHECKING:
    from selfspec.accept import Rule


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is checked, and how strictly.

    Greedy decoding is verified under the first rule, and under every one that is not lossless.

    Raises:
        UnsupportedOptionError: a value out of range, or a rule that is not known or named twice.
    """

    accept: Annotated[
        list[str] | None,
        Option(
            metavar="RULE",
            help="Acceptance rule; may be repeated. A relaxed rule is not exact, and shows. Default: every rule of "
            "`selfspec drafts` that is lossless.",
        ),
    ] = None
    max_new_tokens: Annotated[int, Option(min=2, help="Generate N tokens a text.")] = 64
    draft_length: Annotated[int, Option(min=1, help="Draft N tokens a round.")] = 4
    samples: Annotated[int, Option(min=100, help="Sample N texts for each test of fit.")] = 400
    seed: Annotated[int, Option(help="Seed of all random draws.")] = 0
    runtime: Annotated[
        Literal["eager", "native", "graphs", "batch-invariant"] | None,
        Option(
            metavar="RUNTIME",
            help="How selfspec runs passes. By `batch-invariant` a draft has to give plain decoding's logits to the "
            "bit. Default: as `generate` does.",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_numbers(self, UnsupportedOptionError)
        if self.accept is None:
            object.__setattr__(self, "accept", _lossless_rules())
        if not isinstance(self.accept, list | tuple):
            raise UnsupportedOptionError(f"accept must be a list of rules, got {shown(self.accept)}")
        for name in self.accept:
            _rule(name)
        if not self.accept or len(set(self.accept)) < len(self.accept):
            raise UnsupportedOptionError(f"name each acceptance rule once, and at least one; got {list(self.accept)}")
        if not 0 <= self.seed < 2**63:
            raise UnsupportedOptionError(f"the seed must be from 0 to 2**63 - 1, got {self.seed}")

    @property
    def rules(self) -> list[str]:
        """Names of the rules, each once."""
        return list(self.accept or ())

    @property
    def greedy_rules(self) -> list[str]:
        """Rules under which greedy decoding is verified. Under lossless ones it is the same computation."""
        first, *others = self.rules
        return [first, *(name for name in others if not _rule(name).lossless)]

    @property
    def coupled_rules(self) -> list[str]:
        """Rules whose tokens, at equal seeds, do not depend on the draft."""
        return [name for name in self.rules if _rule(name).couples]

    @property
    def sampled_rules(self) -> list[str]:
        """Rules under which every draft has its own sampled distribution."""
        return [name for name in self.rules if not _rule(name).couples]

    @property
    def lossless(self) -> bool:
        """True if all rules are lossless."""
        return all(_rule(name).lossless for name in self.rules)


def _lossless_rules() -> list[str]:
    """Return every lossless rule; first the one that greedy decoding uses, since that is verified under the first."""
    from selfspec.accept import default_rule, rules

    found = [name for name, rule in rules().items() if rule.lossless]
    return sorted(found, key=lambda name: rules()[name] != default_rule(greedy=True))


def _rule(name: str) -> Rule:
    from selfspec.accept import find_rule

    return find_rule(name)
