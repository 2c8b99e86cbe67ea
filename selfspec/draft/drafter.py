"""What a drafter is: a configuration, whose proposer turns the state of one generation into drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, Self

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.draft.declaration import Declaration, name_of
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.offer import Offer
from selfspec.draft.rows_apart import lengths_of
from selfspec.draft.rows_view import RowsView
from selfspec.draft.verdict import Verdict
from selfspec.model.early_head import DraftHead
from selfspec.model.features import Features, Point
from selfspec.model.substitutes import Substitutes
from selfspec.runtime.runner import PassResult

MODEL = 0
"""The match length of drafts for which a model ran."""


@dataclass(frozen=True)
class Exit:
    """Where a draft leaves the network: all it computes is what the target computes first.

    Attributes:
        layer: the first layer left out.
        head: what reads the states there; None: the model's own norm and head.
    """

    layer: int
    head: DraftHead | None


@dataclass(frozen=True)
class OwnBytes:
    """What a drafter takes in memory beside the model.

    Attributes:
        weights: bytes of its weights.
        token: bytes of its keys and values of one token of a row.
        row: bytes of a row whatever its length.
        copies: bytes of one token of a row that are made again of the model's own keys and values where they lack.
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
    """What a drafter keeps of texts as long as the wrapper, in `RowsView.memories`."""


class Proposer(ABC):
    """What drafts in one generation, and all that it keeps meanwhile. Made by `Drafter.begin`."""

    matches: ClassVar[tuple[int, ...]] = (MODEL,)
    """The match lengths that its drafts always have; none: they depend on the text. See `Draft.match_length`."""

    @abstractmethod
    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        """Propose tokens for each row, a tree of the same shape for all, or none if the controller advises against it.

        Leaves the cursors of the cache where they were. The budget has a depth of at least 1.
        """

    def look_up(self, rows: RowsView, budget: Budget) -> Draft | None:
        """Propose without asking the controller, if that takes no pass of a model; None: it takes one."""
        return None

    def offers(self, rows: RowsView, budget: Budget) -> list[tuple[Offer, ...]]:
        """Return what a proposer without a model offers to each running row, for `Union` to merge.

        Here its draft, whose tokens are trusted alike.
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
            rows: of the prompts.
            counts: how many of these tokens each row has; what comes behind them is scrap.
            features: of these tokens.
        """

    def ask(self, draft: Draft, target: PassResult) -> None:  # noqa: B027 - most need nothing
        """Ask the device for what `learn` is to know of a round that was verified and not judged yet.

        Nothing may wait here. The verdict waits for all that was asked for before: see `device.HostCopy`.
        """

    def learn(  # noqa: B027 - most do not
        self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict
    ) -> None:
        """Learn from a round before it is committed.

        Args:
            rows: as the draft saw them.
            draft: by whatever source.
            target: of the pass that verified it; logits are the target's own, `[rows, nodes + 1, vocab]`.
            verdict: on the draft.
        """

    @property
    def early_exit(self) -> Exit | None:
        """Where it leaves the network early, between two layers, having skipped nothing; None: it does not."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of weights, keys and values that it takes beside the model's own."""
        return 0

    @property
    def row_bytes(self) -> int:
        """Bytes of these that grow with the rows and their texts."""
        return 0

    def hold(self, rows: int, tokens: int) -> None:  # noqa: B027 - most keep nothing of rows
        """Make storage for `rows` rows of `tokens` committed tokens each, as the shared cache has."""

    def join(self, other: Self) -> None:  # noqa: B027 - most keep nothing of rows
        """Take over what a proposer of the same drafter keeps for the rows of another batch, behind one's own."""

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027 - most keep nothing of rows
        """Keep only what belongs to some rows, which are numbered anew in the order given."""


class FreeProposer(Proposer):
    """Drafts without a pass of any model."""

    matches: ClassVar[tuple[int, ...]] = ()

    @abstractmethod
    def look_up(self, rows: RowsView, budget: Budget) -> Draft:
        """Propose; no tokens where nothing is known of any unfinished row, or none would pay."""

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        found = self.look_up(rows, budget)
        return found if found.length and rows.controller.tries(found.match_length) else rows.no_draft()


class Drafter(ABC):
    """Proposes tokens. A drafter is configuration alone, hashable: it holds nothing of a model or of a generation.

    Attributes:
        declared: its names, and what is said of it in help and docs: see `selfspec.draft.registry.drafter`.
        runs: what a draft step runs.
        bits: of the substitutes that it runs layers with; None: it runs none.
        sources: the drafters that it is made of, in order; none: it is one itself.
        own_nodes: the most nodes that verification reads for it besides those of a draft.
    """

    declared: ClassVar[tuple[Declaration, ...]] = ()
    runs: Literal["nothing", "layers", "model"] = "nothing"
    bits: int | None = None
    sources: tuple[Drafter, ...] = ()

    @property
    def own_nodes(self) -> int:
        return max((source.own_nodes for source in self.sources), default=0)

    @abstractmethod
    def begin(self, rows: RowsView) -> Proposer:
        """Make what drafts in one generation, before any pass.

        Raises:
            SelfSpecError: the drafter cannot draft for these prompts.
        """

    def check(self, depth: int) -> None:
        """Refuse a network of `depth` layers that this drafter does not fit.

        Raises:
            DraftConfigError: naming what is out of range.
        """
        for source in self.sources:
            source.check(depth)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        """Refuse a model that this drafter was not made for. Asked once, when the model is wrapped.

        Raises:
            SelfSpecError: naming what does not fit.
        """
        for source in self.sources:
            source.check_model(model, adapter)

    def features(self, depth: int) -> tuple[Point, ...]:
        """Return the points of a network of `depth` layers whose states it drafts from."""
        return tuple(dict.fromkeys(point for source in self.sources for point in source.features(depth)))

    def check_joining(self) -> None:
        """Refuse to draft for rows that join a running batch and leave it.

        Raises:
            DraftConfigError: what it keeps belongs to the batch as a whole.
        """
        for source in self.sources:
            source.check_joining()

    def prepare(self, model: PreTrainedModel, substitutes: Substitutes) -> None:
        """Read substitutes that the drafter has in a file. Asked when the model is wrapped, and when it was moved.

        Raises:
            SelfSpecError: the file cannot be used, or is another model's.
        """
        for source in self.sources:
            source.prepare(model, substitutes)

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        """The draft cost ratio c, estimated: a draft step's cost in steps of plain decoding. 0: it runs no model."""
        return max((source.cost(model, adapter) for source in self.sources), default=0.0)

    def cache_bytes_read(self, model: PreTrainedModel, adapter: Adapter, lengths: Sequence[int]) -> float:
        """Count bytes of the model's keys and values that a draft step reads behind rows of these lengths."""
        return max((source.cache_bytes_read(model, adapter, lengths) for source in self.sources), default=0.0)

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        """Count what it takes beside a model, whose weights may be on the meta device; of substitutes nothing."""
        return sum((source.own_bytes(model) for source in self.sources), OwnBytes())

    def saved_from(self, model: PreTrainedModel) -> Drafter:
        """Return what drafts the same with a copy of the model that is saved to another folder."""
        return self.mapped(lambda each: each if each is self else each.saved_from(model))

    @property
    def last(self) -> Drafter:
        """The drafter that runs a model, of those it is made of, else the last of them; itself if it is of none."""
        found = [source.last for source in self.sources] or [self]
        return next((each for each in found if each.runs != "nothing"), found[-1])

    def mapped(self, change: Callable[[Drafter], Drafter]) -> Drafter:
        """Return the same with something else in the place of each drafter that it is made of, or of itself."""
        return change(self)

    def followed_by(self, behind: Drafter) -> Drafter | None:
        """Return the drafter that is written as this one, `+` and another; None: a cascade of the two."""
        return None

    def in_bits(self, bits: int) -> Drafter | None:
        """Return the same with its own weights in 8 or 4 bits; None: it has none that can be rounded."""
        return None

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> Drafter:
        """Return the drafter that is written `name` or `name:argument`; the name is one that it declares.

        Raises:
            ValueError: the argument is not of the grammar.
            SelfSpecError: what it names cannot be used.
        """
        if argument is not None:
            raise ValueError(argument)
        return cls()

    @classmethod
    def spelled_behind(cls, before: Drafter, name: str, argument: str | None) -> Drafter:
        """Return the drafter that is written behind another one, `before+name:argument`; it declares the name.

        Raises:
            ValueError: the argument is not of the grammar, or it does not go behind that one.
            SelfSpecError: what it names cannot be used.
        """
        raise ValueError(argument)

    @property
    def spelling(self) -> str | None:
        """How it is written, as `spelled` reads it; None: no name says all of it."""
        try:
            return name_of(type(self)) if self == type(self)() else None
        except TypeError:
            return None

    @classmethod
    def variants(cls, depth: int) -> Sequence[Drafter]:
        """Return what `selfspec calibrate` tries of this kind on a network of `depth` layers."""
        return ()

    @classmethod
    def variants_behind(cls, before: Drafter, context: int) -> Sequence[Drafter]:
        """Return what `selfspec calibrate` tries of this kind behind another draft, over texts of `context` tokens."""
        return ()


class Stateless(Drafter, Proposer):
    """A drafter that keeps nothing: it is its own proposer."""

    def begin(self, rows: RowsView) -> Proposer:
        return self
