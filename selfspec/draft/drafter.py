"""Base classes: a drafter is a configuration; its proposer drafts in one generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, Self, TypeVar

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.draft.draft import Budget, Draft, Verdict
from selfspec.draft.rows_view import RowsView
from selfspec.formats.format import Format
from selfspec.model.gated_view import Features, Point
from selfspec.runtime.request import PassResult

GROUP = "selfspec.drafts"
"""The group of entry points in which other packages name their drafters."""

MODEL = 0
"""The match length of drafts for which a model ran."""

PREDICTED = 1 << 10
"""The match length of drafts out of predictions, which go ahead of all others."""

_Kind = TypeVar("_Kind")


class Drafter(ABC):
    """Proposes tokens. A drafter is a hashable configuration, without the state of a model or a generation.

    Attributes:
        declared: its names, with texts for help and docs: see `selfspec.draft.drafter`.
        runs: the part of a model that a draft step runs.
        format: format of its substitutes; None: it uses none.
        sources: the drafters that it joins, in order.
        branches: True if the model must be able to read its drafts as trees.
    """

    declared: ClassVar[tuple[Declaration, ...]] = ()
    runs: Literal["nothing", "layers", "model"] = "nothing"
    format: Format | None = None
    sources: tuple[Drafter, ...] = ()
    branches: ClassVar[bool] = False

    @abstractmethod
    def begin(self, rows: RowsView) -> Proposer:
        """Make the proposer of one generation, before any pass.

        Raises:
            SelfSpecError: the drafter cannot draft for these prompts.
        """

    def check(self, depth: int) -> None:
        """Refuse a network of `depth` layers that the drafter does not fit.

        Raises:
            DraftConfigError: naming what is out of range.
        """
        for source in self.sources:
            source.check(depth)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        """Refuse a model that the drafter was not made for; called once, when the model is wrapped.

        Raises:
            SelfSpecError: naming what does not fit.
        """
        if self.branches:
            adapter.check_trees(model)
        for source in self.sources:
            source.check_model(model, adapter)

    def features(self, depth: int) -> tuple[Point, ...]:
        """Return the points of a network of `depth` layers whose states the drafter reads."""
        return tuple(dict.fromkeys(point for source in self.sources for point in source.features(depth)))

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        """Estimate the draft cost ratio c: the cost of a draft step in plain steps; 0 without a model."""
        return max((source.cost(model, adapter) for source in self.sources), default=0.0)

    def cache_bytes_read(self, model: PreTrainedModel, adapter: Adapter, lengths: Sequence[int]) -> float:
        """Count the bytes of the model's keys and values that a draft step reads for rows of these lengths."""
        return max((source.cache_bytes_read(model, adapter, lengths) for source in self.sources), default=0.0)

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        """Count the drafter's memory beside a model, without substitutes. Weights may be on the meta device."""
        return sum((source.own_bytes(model) for source in self.sources), OwnBytes())

    def saved_from(self, model: PreTrainedModel) -> Drafter:
        """Return a drafter that drafts the same for a copy of the model saved to another folder."""
        return self.mapped(lambda each: each if each is self else each.saved_from(model))

    @property
    def last(self) -> Drafter:
        """The source that runs a model, else the last source; without sources, the drafter itself."""
        found = [source.last for source in self.sources] or [self]
        return next((each for each in found if each.runs != "nothing"), found[-1])

    def mapped(self, change: Callable[[Drafter], Drafter]) -> Drafter:
        """Return a copy with `change` applied to each of its drafters; without parts, to itself."""
        return change(self)

    def followed_by(self, behind: Drafter) -> Drafter | None:
        """Return the drafter written `this+behind`; None: a cascade of the two."""
        return None

    def in_format(self, format: Format) -> Drafter | None:
        """Return a copy with its own weights in a format; None: none of its weights can be packed."""
        return None

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> Drafter:
        """Return the drafter written `name` or `name:argument`, for a name that the class declares.

        By default the class takes the argument, where its declaration has one.

        Raises:
            ValueError: the argument is not of the grammar.
            SelfSpecError: the argument names something that cannot be used.
        """
        form = next((each.argument for each in cls.declared if each.name == name), "")
        if argument is None and not form.startswith(":"):
            return cls()
        if not form or not argument:
            raise ValueError(argument)
        made: Callable[[str], Drafter] = cls
        return made(argument)

    @classmethod
    def spelled_behind(cls, before: Drafter, name: str, argument: str | None) -> Drafter:
        """Return the drafter written `before+name:argument`, for a name that the class declares.

        Raises:
            ValueError: the argument is not of the grammar, or the drafter does not go behind `before`.
            SelfSpecError: the argument names something that cannot be used.
        """
        raise ValueError(argument)

    @property
    def spelling(self) -> str | None:
        """Name and argument that `spelled` reads; None: they cannot express the whole configuration."""
        try:
            return name_of(type(self)) if self == type(self)() else None
        except TypeError:
            return None

    @classmethod
    def variants(cls, depth: int) -> Sequence[Drafter]:
        """Return the drafters of this class that `selfspec calibrate` tries on a network of `depth` layers."""
        return ()

    @classmethod
    def variants_behind(cls, before: Drafter, context: int) -> Sequence[Drafter]:
        """Return the drafters behind `before` that `selfspec calibrate` tries, on texts of `context` tokens."""
        return ()


class Proposer(ABC):
    """Drafts in one generation and keeps its state. `Drafter.begin` makes it.

    Attributes:
        matches: match lengths that its drafts always have; none: they depend on the text. See `Draft.match_length`.
        parts: the proposers that it joins, in order; by default every call is passed on to them.
        row_states: what it keeps of each row, by the row's number; by default nothing.
    """

    matches: ClassVar[tuple[int, ...]] = (MODEL,)
    parts: Sequence[Proposer] = ()
    row_states: Sequence[Any] = ()

    @abstractmethod
    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        """Propose a tree of tokens, of one shape for all rows, or none if the controller advises against it.

        The cache's cursors stay in place. The budget has a depth of at least 1.
        """

    def look_up(self, rows: RowsView, budget: Budget) -> Draft | None:
        """Propose without asking the controller; return None if a draft takes a pass of a model."""
        return None

    def read_prompt(self, rows: RowsView, counts: Sequence[int], features: Features) -> None:
        """Learn from a pass over prompt tokens, before they are committed.

        Args:
            rows: the rows of the prompts.
            counts: number of tokens read in each row; ignore any behind them.
            features: the target's states of these tokens.
        """
        for part in self.parts:
            part.read_prompt(rows, counts, features)

    def end(self) -> None:
        """Give back what the next text may use."""
        for part in self.parts:
            part.end()

    def ask(self, draft: Draft, target: PassResult) -> None:
        """Start the copies from the device that `learn` needs, after verification and before the verdict.

        Do not wait here; the verdict waits for all copies started before it: see `device.HostCopy`.
        """
        for part in self.parts:
            part.ask(draft, target)

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        """Learn from a round before it is committed.

        Args:
            rows: the rows as the draft saw them.
            draft: the draft of the round, from any source.
            target: result of the verification pass; logits are the target's own, `[rows, nodes + 1, vocab]`.
            verdict: the verdict on the draft.
        """
        for part in self.parts:
            part.learn(rows, draft, target, verdict)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, keys and values beside the model's own."""
        return sum(part.nbytes for part in self.parts)

    @property
    def row_bytes(self) -> int:
        """Part of `nbytes` that grows with the rows and their texts."""
        return sum(part.row_bytes for part in self.parts)

    def hold(self, rows: int, tokens: int) -> None:
        """Make storage for `rows` rows of `tokens` committed tokens each, as the shared cache does."""
        for part in self.parts:
            part.hold(rows, tokens)

    def join(self, other: Self) -> None:
        """Append the rows of another batch, with their state in a proposer of the same drafter."""
        if other.row_states:
            self.row_states = [*self.row_states, *other.row_states]
        for part, joined in zip(self.parts, other.parts, strict=True):
            part.join(joined)

    def select(self, rows: Sequence[int]) -> None:
        """Keep the state of some rows alone, renumbered in the order given."""
        if self.row_states:
            self.row_states = [self.row_states[row] for row in rows]
        for part in self.parts:
            part.select(rows)


class FreeProposer(Proposer):
    """Drafts without a pass of any model."""

    matches: ClassVar[tuple[int, ...]] = ()

    @abstractmethod
    def look_up(self, rows: RowsView, budget: Budget) -> Draft:
        """Propose a draft; empty if nothing is known of any unfinished row, or no draft would pay."""

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        found = self.look_up(rows, budget)
        return found if found.length and rows.controller.tries(found.match_length) else rows.no_draft()


class Stateless(Drafter, Proposer):
    """Drafts without state: the drafter is its own proposer."""

    def begin(self, rows: RowsView) -> Proposer:
        return self


@dataclass(frozen=True)
class OwnBytes:
    """Counts a drafter's memory beside the model, in bytes."""

    weights: int = 0
    token: int = 0  # keys and values for one token of a row
    row: int = 0  # memory of a row of any length

    def __add__(self, other: OwnBytes) -> OwnBytes:
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return OwnBytes(**sums)


class DraftMemory:
    """Keeps a drafter's memory of texts as long as the wrapper lives, in `RowsView.memories`."""


@dataclass(frozen=True)
class Declaration:
    """Gives a drafter's name and help text."""

    name: str
    argument: str  # the text after the name, such as `:FILE`; optional parts are in brackets
    help: str
    example: str  # the name with a sensible argument
    written: Literal["alone", "behind"]  # by itself, or behind another draft and a `+`

    @property
    def form(self) -> str:
        """Grammar, such as `exit:E`."""
        return ("draft+" if self.written == "behind" else "") + self.name + self.argument


def drafter(
    name: str,
    *,
    help: str,
    argument: str = "",
    example: str = "",
    written: Literal["alone", "behind"] = "alone",
) -> Callable[[type[_Kind]], type[_Kind]]:
    """Declare a drafter's name; see `Declaration`. Repeat it for a class with two names.

    In your own package, name the class in the entry point group `selfspec.drafts` as well.
    """

    def declared(kind: type[_Kind]) -> type[_Kind]:
        own: Any = kind
        usual = name if argument.startswith("[") else name + argument
        found = Declaration(name, argument, help, example or usual, written)
        own.declared = (found, *vars(kind).get("declared", ()))
        return kind

    return declared


def name_of(kind: type[object]) -> str:
    """Return the name that a class of drafters declares, if it is known by this name; else `module:Class`."""
    declared: tuple[Declaration, ...] = vars(kind).get("declared", ())
    whole = f"{kind.__module__}:{kind.__qualname__}"
    return declared[0].name if declared and (kind.__module__.startswith("selfspec.") or whole in _named()) else whole


@cache
def _named() -> frozenset[str]:
    return frozenset(point.value for point in entry_points(group=GROUP))


def read_number(text: str | None) -> int:
    """Read the number of a layer or of tokens, of at most nine digits; raise ValueError for other text."""
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(text)
    return int(text)
