"""Fit drafters to a model that streams: rounded copies draft for streamed layers, the other layers as they are."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.shared_layer import CacheKind
from selfspec.control import CostAware
from selfspec.control.costs import Costs
from selfspec.control.profile import DraftChoice
from selfspec.draft import Drafter, EarlyExit, LowPrecision
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import draft_name
from selfspec.errors import DraftConfigError, UnsupportedModelError
from selfspec.formats.format import copies, formats
from selfspec.model.layer_path import Part, Sublayer
from selfspec.model.sizes import bytes_read, share_read
from selfspec.model.substitutes import Substitutes
from selfspec.placement.plan import LONGEST, NODES, Plan
from selfspec.placement.weight_stream import WeightStream

# Cost of a further token in a pass that streams, and of the rest of a round, in plain steps.
_WIDENING, _OVERHEAD = 0.005, 0.01


class _StandIn(LowPrecision):
    """Drafts in low precision by substitutes that were made when the weights were loaded."""

    def __repr__(self) -> str:
        return self.format.name + ("" if self.fewer is None else f"+{self.fewer.spelling}")

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        if self.fewer is not None:
            self.fewer.check_model(model, adapter)


@dataclass(frozen=True)
class Placement:
    """Says how a model was placed in memory; the model keeps it, so that every wrapper of it drafts within the budget.

    Attributes:
        head: True if the head is streamed.
        context: tokens that the cache may hold, of all rows together.
        at_once: tokens of prompts that a pass may read, of all rows together.
        streams_from_disk: True if weights come from the disk, and the budget limits the process.
    """

    plan: Plan
    depth: int
    head: bool
    context: int
    at_once: int
    substitutes: Substitutes
    cache: CacheKind = "exact"
    stream: WeightStream | None = None
    streams_from_disk: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> Placement:
        # A copy of the model streams what the model streams.
        return self

    def choice(self, asked: DraftChoice, model: PreTrainedModel, adapter: Adapter) -> DraftChoice:
        """Return the choice fitted to this placement: streamed weights draft in fewer bits, and drafts may be long."""
        if asked.draft is None:
            return asked
        if not self.plan.streamed:
            name = format_of(asked.draft)
            if name is not None and name != self.plan.format:
                raise DraftConfigError(
                    f"no memory was set aside for copies in {formats()[name].bits} bits; {_anew(asked.draft)}"
                )
            return asked
        draft = asked.draft.mapped(self._fitted)
        costs = Costs(self._step(draft, model, adapter), verify=1.0, widening=_WIDENING, overhead=_OVERHEAD)
        nodes = None
        # A GPU computes a wide pass while weights arrive.
        if not self.streams_from_disk:
            with suppress(UnsupportedModelError):
                adapter.check_trees(model)
                nodes = NODES
        return DraftChoice(draft, CostAware(LONGEST, nodes=nodes), costs)

    def _fitted(self, draft: Drafter) -> Drafter:
        """Return the draft by substitutes that are here, in place of one that would make some."""
        if not isinstance(draft, LowPrecision):
            return draft
        draft.check(self.depth)
        if format_of(draft) != self.plan.format:
            made = (
                "no rounded copies"
                if self.plan.format is None
                else f"copies in {formats()[self.plan.format].bits} bits"
            )
            raise DraftConfigError(f"{draft_name(draft)} needs rounded copies; here are {made}; {_anew(draft)}")
        kept = [layer for layer in draft.layers or () if layer < self.plan.resident]
        if kept:
            raise DraftConfigError(
                f"layers={list(draft.layers or ())}: {kept} stay in memory as they are, and the budget has no room for "
                "copies of them; leave layers out, and those that are streamed have copies"
            )
        end = draft.fewer.layer if isinstance(draft.fewer, EarlyExit) else self.depth
        if draft.fewer is not None and not any(
            draft.fewer.path(self.depth).runs(Sublayer(layer, part))
            for layer in range(self.plan.resident, self.depth)
            for part in Part
        ):
            # The draft runs no streamed layer.
            return draft.fewer
        layers = range(self.plan.resident, end) if draft.layers is None else draft.layers
        head = draft.head_too and self.head
        return _StandIn(layers=layers, fewer=draft.fewer, head=head, format=draft.format)

    def _step(self, draft: Drafter, model: PreTrainedModel, adapter: Adapter) -> float:
        """Predict c."""
        last = draft.last
        bandwidth = self.plan.bandwidth
        if format_of(last) is not None and self.plan.draft_step is not None:
            return self.plan.draft_step
        if isinstance(last, LayerPathDrafter):
            path = last.path(self.depth)

            def seconds(weight: Tensor) -> float:
                return weight.nbytes / (bandwidth.stream if weight.is_meta else bandwidth.memory)

            return share_read(model, adapter, path, last.head, seconds)
        cost = last.cost(model, adapter)
        # A head stays in memory.
        in_memory = bytes_read(model, adapter) / bandwidth.memory * self.plan.plain
        return cost * in_memory if last.runs == "model" else cost


def format_of(draft: Drafter) -> str | None:
    """Return the name of the format of the copies that a draft needs; None: it needs none."""

    def checked(each: Drafter) -> Drafter:
        if not isinstance(each, LowPrecision):
            if each.format is not None:
                names = " and ".join(copies())
                raise DraftConfigError(f"{draft_name(each)}: within a budget fewer bits are those of {names}")
            return each
        usual = type(each.format)()
        if each.format != usual:
            raise DraftConfigError(f"{each.format}: within a budget weights are kept in {usual}")
        return each

    draft.mapped(checked)
    return None if draft.format is None else draft.format.name


def _anew(draft: Drafter) -> str:
    name = draft_name(draft)
    return f"name it when the model is loaded: selfspec.load(..., draft={name!r}), --draft {name}"


def placement_of(model: PreTrainedModel) -> Placement | None:
    """Return the placement of a model; None: `selfspec.load` did not load it."""
    found = model.__dict__.get("placement")
    return found if isinstance(found, Placement) else None
