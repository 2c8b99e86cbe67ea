"""A model by a plan: weights that stay are read, the other layers stream theirs, and substitutes draft for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from selfspec.control import CostAware
from selfspec.control.costs import Costs
from selfspec.control.draft_policy import DraftChoice, DraftPolicy
from selfspec.draft import Cascade, LowPrecision, PromptLookup
from selfspec.kernels.rounded import Precision
from selfspec.model.adapter import Adapter
from selfspec.model.substitutes import Substitutes
from selfspec.placement.plan import LONGEST, SLOTS, Plan
from selfspec.placement.skeleton import names_by_weight, set_weight
from selfspec.placement.survey import GROUP_SIZE, StreamableModule, Survey
from selfspec.placement.weight_files import ReadBuffer
from selfspec.placement.weight_stream import WeightStream, stream_module

# What a further token adds to a pass that streams, and all else to a round, in plain steps.
_WIDENING, _OVERHEAD = 0.005, 0.01


@dataclass(frozen=True)
class StreamedDraft(DraftPolicy):
    """Drafts with look-ups and with substitutes of what is streamed.

    Attributes:
        draft: what drafts.
        longest: tokens drafted a round at most.
        costs: predicted.
    """

    draft: Cascade
    longest: int
    costs: Costs

    def choose_draft(self, greedy: bool) -> DraftChoice:
        return DraftChoice(self.draft, CostAware(self.longest), self.costs)


class _StandIn(LowPrecision):
    """Low precision whose substitutes were made while the weights were there."""

    def __repr__(self) -> str:
        return f"int{self.bits}"

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        return


@dataclass(frozen=True)
class Placed:
    """A model that was loaded by a plan.

    Attributes:
        model: some of its layers may take their weights from a stream.
        substitutes: of what is streamed.
        draft: what drafts by default; None: plain decoding.
    """

    model: PreTrainedModel
    substitutes: Substitutes
    draft: DraftPolicy | None


def place(surveyed: Survey, plan: Plan) -> Placed:
    """Read the weights that stay in memory, and let the other layers stream theirs.

    Raises:
        StorageError: the disk does not give them.
    """
    made = surveyed.skeleton
    streamed = [module for layer in surveyed.layers[plan.resident :] for module in layer]
    away = {f"{module.name}.{weight}" for module in streamed for weight in module.weights}
    for names in names_by_weight(made.model).values():
        stored = next((made.stored[name] for name in names if name in made.stored), None)
        if stored is not None and not away.intersection(names):
            read = ReadBuffer(stored.nbytes).read(surveyed.files, stored).to(surveyed.dtype)
            set_weight(made.model, names, nn.Parameter(read, requires_grad=False))
    substitutes = Substitutes()
    if streamed:
        _stream(surveyed, streamed, plan.bits, substitutes)
    return Placed(made.model, substitutes, _draft(surveyed, plan))


def _stream(surveyed: Survey, modules: Sequence[StreamableModule], bits: int | None, substitutes: Substitutes) -> None:
    """Let modules take their weights from a stream, and make their substitutes."""
    weights = [weight for module in modules for weight in module.weights.values()]
    stream = WeightStream(weights, SLOTS, surveyed.dtype, surveyed.files)
    first = 0
    for each in logging.tqdm(modules, desc="Rounding streamed weights", delay=2, disable=bits is None):
        module = surveyed.skeleton.model.get_submodule(each.name)
        numbers = range(first, first + len(each.weights))
        first += len(each.weights)
        if bits is not None:
            with stream.lend(numbers) as lent:
                substitutes.take(module, each.name, Precision(bits, GROUP_SIZE), lent)
        stream_module(module, list(each.weights), numbers, stream)


def _draft(surveyed: Survey, plan: Plan) -> StreamedDraft | None:
    depth = len(surveyed.layers) - 1
    if plan.bits is None or plan.draft_step is None or plan.resident >= depth:
        return None
    low = _StandIn(plan.bits, GROUP_SIZE, range(plan.resident, depth), head=bool(surveyed.layers[depth]))
    costs = Costs(plan.draft_step, verify=1.0, widening=_WIDENING, overhead=_OVERHEAD)
    return StreamedDraft(Cascade(PromptLookup(), low), LONGEST, costs)
