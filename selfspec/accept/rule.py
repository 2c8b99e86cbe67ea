"""Verification rules: what a rule is, and how rules are found by name.

A rule is found by its own name, by an entry point of another package, or as `module:Class`. A `:` behind the name
sets its fields: `relaxed-top-k:top_k=5,tolerance=2`.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from selfspec.accept.block import Block
from selfspec.accept.relaxed import TopKTolerance, Typical
from selfspec.accept.token_level import Coupled, TokenLevel
from selfspec.arguments import ClassPath, check_kind
from selfspec.cache.tree import Tree
from selfspec.draft.draft import Draft
from selfspec.errors import UnsupportedOptionError

GROUP = "selfspec.rules"
"""The group of entry points in which other packages name their rules: `name = module:Class`."""

_OWN = (Block(), TokenLevel(), Coupled(), Typical(), TopKTolerance())


@runtime_checkable
class Rule(Protocol):
    """A verification rule: decides how much of a draft is accepted and how the next token is distributed.

    A rule gives each node of the draft a chance (`accept_probs`); the loop draws a mask by these chances; `accepted`
    reads the mask, and `recovery_probs` weights the token after the accepted nodes. So the distribution of the
    committed tokens can be computed exactly, as a sum over drafts and masks, without sampling. A rule draws nothing
    and does not wait for the device.

    Places: 0 is the last committed token, i + 1 is node i. The target gives p and logits at each place, for the token
    that follows: `[rows, nodes + 1, vocab]`; logits are the target's own, before temperature and filters. In a chain a
    place is also the number of draft tokens up to it.

    Attributes:
        lossless: whether the committed tokens are distributed exactly as the target's own tokens.
        couples: whether draft and target choose their tokens with the noise of the place (see `Noise.choose`).
    """

    @property
    def lossless(self) -> bool: ...

    @property
    def couples(self) -> bool: ...

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        """Return each node's chance if its parent is accepted and its earlier siblings are not, `[rows, nodes]`."""
        ...

    def accepted(self, mask: Tensor, tree: Tree) -> Tensor:
        """Return the place of the deepest accepted node, `[rows]`; 0: no node is accepted.

        `mask` says whether the draw of each node fell within its chance, `[rows, nodes]`.
        """
        ...

    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        """Return the weights of the token after the accepted nodes, `[rows, vocab]`, not normalised.

        They are p at the place less the share of its rejected children; at a leaf p itself, from which the bonus token
        is drawn. p is the target's, `[rows, nodes + 1, vocab]`; `place` is the deepest accepted node's, `[rows]`.
        """
        ...


@cache
def rules() -> Mapping[str, Rule]:
    """Return every rule by name, this package's first; names of its rules that are not lossless begin with `relaxed-`.

    UnsupportedOptionError: a package declares a name that is taken, or names a class that is no rule.
    """
    found: dict[str, Rule] = {each.name: each for each in _OWN}
    for point in entry_points(group=GROUP):
        if point.name in found:
            raise UnsupportedOptionError(f"{point.value} declares the rule {point.name!r}, and there is one already")
        found[point.name] = _made(point.load(), point.value)
    return found


def find_rule(accept: str | Rule) -> Rule:
    """Return the rule with a name or a `module:Class`; return a rule as it is.

    UnsupportedOptionError: no rule has that name, the class is no rule, or it has no such fields.
    """
    listed = ", ".join(rules())
    if not isinstance(accept, str):
        check_kind("accept", accept, Rule, f"choose one of {listed}")
        return accept
    name, _, argument = accept.partition(":")
    if name in rules():
        return _made(type(rules()[name]), name, argument) if argument else rules()[name]
    named = ClassPath.read(accept)
    if named is None:
        raise UnsupportedOptionError(f"no acceptance rule {accept!r}; choose one of {listed}, or module:Class")
    try:
        found = named.load()
    except (ModuleNotFoundError, AttributeError) as error:
        raise UnsupportedOptionError(f"no acceptance rule {accept!r}: {error}; choose one of {listed}") from error
    return _made(found, f"{named.module}:{named.name}", named.argument or "")


def rule_name(rule: Rule) -> str | None:
    """Return the name by which `find_rule` finds a rule; None if it has none."""
    kind: Any = type(rule)
    if kind.__module__ == "__main__":
        return None
    own = f"{kind.__module__}:{kind.__qualname__}"
    name = next((name for name, each in rules().items() if type(each) is kind), own)
    try:
        return next((found for found in (name, with_fields(name, rule)) if find_rule(found) == rule), None)
    except (TypeError, UnsupportedOptionError):
        return None


def with_fields(name: str, rule: Rule) -> str:
    """Return the name of a rule followed by all its fields, as `find_rule` reads them."""
    own: Sequence[Field[Any]] = fields(rule) if is_dataclass(rule) else ()
    written = ",".join(f"{each.name}={getattr(rule, each.name)!r}" for each in own if each.init)
    return f"{name}:{written}" if written else name


def _made(kind: object, named: str, argument: str = "") -> Rule:
    """Make a rule from a class and its fields, `name=number` joined by commas."""
    try:
        pairs = (each.partition("=") for each in argument.split(",") if argument)
        given = {name.strip(): literal_eval(value.strip()) for name, _, value in pairs}
        made = kind(**given) if isinstance(kind, type) else None
    except (TypeError, ValueError, SyntaxError) as error:
        # Errors of selfspec have a message of their own.
        if isinstance(error, UnsupportedOptionError):
            raise
        made = None
    if isinstance(made, Rule):
        return made
    if argument:
        raise UnsupportedOptionError(
            f"the acceptance rule {named} takes no {argument!r}; write e.g. {named}:name=2,other=0.5"
        )
    raise UnsupportedOptionError(f"{named} is no acceptance rule that is made without arguments; see selfspec.rules")
