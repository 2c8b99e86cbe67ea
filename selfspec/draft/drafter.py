"""Base classes: a drafter is a configuration, and its proposer turns the state of one generation into drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, Self, TypeVar

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.draft.draft import Budget, Draft, Offer, Verdict
from selfspec.draft.rows_view import RowsView, lengths_of
from selfspec.formats.format import Format
from selfspec.model.early_head import DraftHead
from selfspec.model.features import Features, Point
from selfspec.model.substitutes import Substitutes
from selfspec.runtime.request import PassResult

GROUP = "selfspec.drafts"
"""The group of entry points in which other packages name their drafters."""

MODEL = 0
"""The match length of drafts for which a model ran."""

_Kind = TypeVar("_Kind")


class Drafter(ABC):
    """Proposes tokens. A drafter is a hashable configuration: it holds no state of a model or of a generation.

    Attributes:
        declared: its names, and its text in help and docs: see `selfspec.draft.registry.drafter`.
        runs: the part of a model that a draft step runs.
        format: format of the substitutes that it runs layers with; None: it uses no substitutes.
        sources: the drafters that it joins, in order; empty: it joins none.
        own_nodes: the most nodes that verification reads for it besides those of a draft.
    """

    declared: ClassVar[tuple[Declaration, ...]] = ()
    runs: Literal["nothing", "layers", "model"] = "nothing"
    format: Format | None = None
    sources: tuple[Drafter, ...] = ()

    @property
    def own_nodes(self) -> int:
        return max((source.own_nodes for source in self.sources), default=0)

    @abstractmethod
    def begin(self, rows: RowsView) -> Proposer:
        """Make the proposer of one generation, before any pass.

        Raises:
            SelfSpecError: the drafter cannot draft for these prompts.
        """

    def check(self, depth: int) -> None:
        """Refuse a network of `depth` layers if the drafter does not fit it.

        Raises:
            DraftConfigError: naming what is out of range.
        """
        for source in self.sources:
            source.check(depth)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        """Refuse a model that this drafter was not made for. Called once, when the model is wrapped.

        Raises:
            SelfSpecError: naming what does not fit.
        """
        for source in self.sources:
            source.check_model(model, adapter)

    def features(self, depth: int) -> tuple[Point, ...]:
        """Return the points of a network of `depth` layers whose states the drafter reads."""
        return tuple(dict.fromkeys(point for source in self.sources for point in source.features(depth)))

    def check_joining(self) -> None:
        """Refuse rows that join and leave a running batch, if the drafter cannot draft for them.

        Raises:
            DraftConfigError: its state belongs to the batch as a whole.
        """
        for source in self.sources:
            source.check_joining()

    def prepare(self, model: PreTrainedModel, substitutes: Substitutes) -> None:
        """Read the drafter's substitutes from a file. Called when the model is wrapped, and after it is moved.

        Raises:
            SelfSpecError: the file cannot be used, or is another model's.
        """
        for source in self.sources:
            source.prepare(model, substitutes)

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        """Estimate the draft cost ratio c: the cost of a draft step in plain steps; 0 if it runs no model."""
        return max((source.cost(model, adapter) for source in self.sources), default=0.0)

    def cache_bytes_read(self, model: PreTrainedModel, adapter: Adapter, lengths: Sequence[int]) -> float:
        """Count bytes of the model's keys and values that a draft step reads for rows of these lengths."""
        return max((source.cache_bytes_read(model, adapter, lengths) for source in self.sources), default=0.0)

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        """Count its memory beside a model, whose weights may be on the meta device; substitutes do not count."""
        return sum((source.own_bytes(model) for source in self.sources), OwnBytes())

    def saved_from(self, model: PreTrainedModel) -> Drafter:
        """Return a drafter that drafts the same for a copy of the model that is saved to another folder."""
        return self.mapped(lambda each: each if each is self else each.saved_from(model))

    @property
    def last(self) -> Drafter:
        """The source that runs a model, else the last source; the drafter itself if it has no sources."""
        found = [source.last for source in self.sources] or [self]
        return next((each for each in found if each.runs != "nothing"), found[-1])

    def mapped(self, change: Callable[[Drafter], Drafter]) -> Drafter:
        """Return a copy with `change` applied to each drafter that it is made of, or to itself if it has no parts."""
        return change(self)

    def followed_by(self, behind: Drafter) -> Drafter | None:
        """Return the drafter that is written `this+behind`; None: a cascade of the two."""
        return None

    def in_format(self, format: Format) -> Drafter | None:
        """Return a copy with its own weights in a format; None: it has no weights that can be packed."""
        return None

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> Drafter:
        """Return the drafter that is written `name` or `name:argument`; the class declares this name.

        Raises:
            ValueError: the argument is not of the grammar.
            SelfSpecError: the argument names something that cannot be used.
        """
        if argument is not None:
            raise ValueError(argument)
        return cls()

    @classmethod
    def spelled_behind(cls, before: Drafter, name: str, argument: str | None) -> Drafter:
        """Return the drafter that is written `before+name:argument`; the class declares this name.

        Raises:
            ValueError: the argument is not of the grammar, or the drafter does not go behind `before`.
            SelfSpecError: the argument names something that cannot be used.
        """
        raise ValueError(argument)

    @property
    def spelling(self) -> str | None:
        """Its name and argument, as `spelled` reads them; None: they cannot express its whole configuration."""
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
    """Drafts in one generation, and keeps the state that this takes. Made by `Drafter.begin`."""

    matches: ClassVar[tuple[int, ...]] = (MODEL,)
    """The match lengths that its drafts always have; none: they depend on the text. See `Draft.match_length`."""

    @abstractmethod
    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        """Propose a tree of tokens, the same shape for all rows, or none if the controller advises against it.

        The cursors of the cache stay where they were. The budget has a depth of at least 1.
        """

    def look_up(self, rows: RowsView, budget: Budget) -> Draft | None:
        """Propose without asking the controller; return None if a draft takes a pass of a model."""
        return None

    def offers(self, rows: RowsView, budget: Budget) -> list[tuple[Offer, ...]]:
        """Return the offers of a proposer without a model to each running row, for `Union` to merge.

        By default they are its draft, with the same trust in all tokens.
        """
        found = self.look_up(rows, budget)
        if found is None or not found.length:
            return [()] * len(rows.running)
        each = zip(found.tokens.tolist(), lengths_of(rows, found), strict=True)
        return [(Offer.of_draft(found, tokens, length),) if length else () for tokens, length in each]

    def read_prompt(  # noqa: B027 - most do not
        self, rows: RowsView, counts: Sequence[int], features: Features
    ) -> None:
        """Learn from a pass over tokens of prompts, before they are committed.

        Args:
            rows: the rows of the prompts.
            counts: number of these tokens in each row; anything behind them is scrap.
            features: the target's states of these tokens.
        """

    def ask(self, draft: Draft, target: PassResult) -> None:  # noqa: B027 - most need nothing
        """Start the copies from the device that `learn` will need, after a round is verified and before it is judged.

        Nothing may wait here; the verdict waits for all copies started before it: see `device.HostCopy`.
        """

    def learn(  # noqa: B027 - most do not
        self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict
    ) -> None:
        """Learn from a round before it is committed.

        Args:
            rows: the rows as the draft saw them.
            draft: the draft of the round, from any source.
            target: result of the pass that verified it; logits are the target's own, `[rows, nodes + 1, vocab]`.
            verdict: the verdict on the draft.
        """

    @property
    def early_exit(self) -> Exit | None:
        """The exit between two layers where it leaves the network, having skipped nothing; None: there is none."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, keys and values beside the model's own."""
        return 0

    @property
    def row_bytes(self) -> int:
        """The part of `nbytes` that grows with the rows and their texts."""
        return 0

    def hold(self, rows: int, tokens: int) -> None:  # noqa: B027 - most keep nothing of rows
        """Make storage for `rows` rows of `tokens` committed tokens each, as the shared cache does."""

    def join(self, other: Self) -> None:  # noqa: B027 - most keep nothing of rows
        """Append the rows of another batch, with the state that a proposer of the same drafter keeps for them."""

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027 - most keep nothing of rows
        """Keep the state of some rows alone, renumbered in the order given."""


class FreeProposer(Proposer):
    """Drafts without a pass of any model."""

    matches: ClassVar[tuple[int, ...]] = ()

    @abstractmethod
    def look_up(self, rows: RowsView, budget: Budget) -> Draft:
        """Propose; the draft is empty if nothing is known of any unfinished row, or no draft would pay."""

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        found = self.look_up(rows, budget)
        return found if found.length and rows.controller.tries(found.match_length) else rows.no_draft()


class Stateless(Drafter, Proposer):
    """Drafts without any state, so that the drafter is its own proposer."""

    def begin(self, rows: RowsView) -> Proposer:
        return self


@dataclass(frozen=True)
class Exit:
    """Names the first layer that a draft leaves out, and the head that reads the states there, if not the own."""

    layer: int
    head: DraftHead | None


@dataclass(frozen=True)
class OwnBytes:
    """Counts the memory that a drafter takes beside the model.

    Attributes:
        weights: bytes of its weights.
        token: bytes of its keys and values for one token of a row.
        row: bytes for a row of any length.
        copies: bytes for one token of a row of copies of the model's keys and values, which are made anew if missing.
    """

    weights: int = 0
    token: int = 0
    row: int = 0
    copies: int = 0

    @property
    def of_token(self) -> int:
        """Bytes of one token of a row."""
        return self.token + self.copies

    def __add__(self, other: OwnBytes) -> OwnBytes:
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return OwnBytes(**sums)


class DraftMemory:
    """Keeps a drafter's memory of texts for as long as the wrapper lives, in `RowsView.memories`."""


@dataclass(frozen=True)
class Declaration:
    """Says how a drafter is written, and what it does.

    Attributes:
        argument: the text after the name, such as `:FILE`; optional parts are in brackets.
        example: the name with an argument that makes sense.
        written: by itself, behind another draft and a `+`, or before drafts that it joins.
    """

    name: str
    argument: str
    help: str
    example: str
    written: Literal["alone", "behind", "before"]

    @property
    def form(self) -> str:
        """Its grammar, such as `exit:E`."""
        return ("draft+" if self.written == "behind" else "") + self.name + self.argument


def drafter(
    name: str,
    *,
    help: str,
    argument: str = "",
    example: str = "",
    written: Literal["alone", "behind", "before"] = "alone",
) -> Callable[[type[_Kind]], type[_Kind]]:
    """Declare a drafter's name; see `Declaration`. May be given twice, for a class with two names.

    In a package of your own, name the class in the entry point group `selfspec.drafts` as well.
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
    """Read the number of a layer, or of tokens: at most nine digits. Raises ValueError."""
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(text)
    return int(text)
