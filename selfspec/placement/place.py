"""Load a checkpoint within a budget: plan, read what stays, stream the rest, and make substitutes that draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from selfspec.arguments import shown
from selfspec.cache.shared_layer import CACHE_KINDS, CacheKind
from selfspec.draft import Cascade, Drafter, LowPrecision, PromptLookup, Recycling
from selfspec.errors import DraftConfigError, UnsupportedOptionError
from selfspec.formats.format import Format, copies, formats
from selfspec.kernels.large_pages import LargePages
from selfspec.model.substitutes import Substitutes
from selfspec.placement.drafts import Placement, format_of
from selfspec.placement.packed import fill
from selfspec.placement.plan import Plan, Stays, parse_bytes, plan_memory, shown_bytes
from selfspec.placement.skeleton import names_by_weight, read_dtype
from selfspec.placement.stored import StoredRun, StoredWeight, bytes_in_memory, drafts_inside
from selfspec.placement.survey import StreamableModule, Survey, survey
from selfspec.placement.weight_source import FromDisk, WeightSource
from selfspec.placement.weight_stream import WeightStream, stream_module
from selfspec.process import give_large_blocks_back


def place(surveyed: Survey, plan: Plan) -> PreTrainedModel:
    """Read the weights that stay in memory, and let the other layers stream theirs."""
    give_large_blocks_back()
    made = surveyed.skeleton
    streamed = [
        (module, plan.stays(number))
        for number, layer in enumerate(surveyed.layers)
        for module in layer
        if plan.stays(number) is not Stays.WHOLE
    ]
    away = {f"{module.name}.{weight}" for module, _ in streamed for weight in module.weights}
    here = {names[0] for names in names_by_weight(made.model).values() if not away.intersection(names)}

    def given(name: str) -> Tensor | StoredWeight:
        return surveyed.packed.get(name) or made.deferred[name].values()

    weights = {name: partial(given, name) for name in here.intersection(made.deferred)}
    fill(made.model, None, weights, surveyed.files, surveyed.source.device)
    substitutes = Substitutes.of(made.model)
    stream = _stream(surveyed, streamed, plan, substitutes) if streamed else None
    depth = len(surveyed.layers) - 1
    head = bool(surveyed.layers[depth]) and plan.resident <= depth
    made.model.__dict__["placement"] = Placement(
        plan,
        depth,
        head,
        surveyed.context,
        surveyed.at_once,
        substitutes,
        surveyed.cache,
        stream,
        streams_from_disk=stream is not None and isinstance(surveyed.source, FromDisk),
    )
    return made.model


WITHOUT_COPIES = Cascade(PromptLookup(), Recycling())
"""Drafts by default where no context leaves room for copies: a wide pass takes no longer than one over a token."""


def default_draft(plan: Plan) -> Drafter | None:
    """Return the default draft: look-ups, and rounded copies of streamed layers if there are any; None: all stay."""
    if not plan.streamed:
        return None
    if plan.format is None:
        return WITHOUT_COPIES
    return Cascade(PromptLookup(), LowPrecision(format=formats()[plan.format]()))


def _stream(
    surveyed: Survey,
    modules: Sequence[tuple[StreamableModule, Stays]],
    plan: Plan,
    substitutes: Substitutes,
) -> WeightStream:
    """Make modules take from a stream what of their weights is not in memory, and make their substitutes."""
    dtype, pages = surveyed.dtype, LargePages()
    fetched = [
        run.whole for module, stays in modules for weight in module.weights.values() for run in weight.runs(stays)
    ]
    sizes = [bytes_in_memory(part, dtype) for part in fetched]
    stream = WeightStream(sizes, surveyed.source.slots(fetched, dtype, surveyed.files))
    first = 0
    for each, stays in logging.tqdm(modules, desc="Placing streamed weights", delay=2):
        module = surveyed.skeleton.model.get_submodule(each.name)
        lent = [(name, run) for name, weight in each.weights.items() for run in weight.runs(stays)]
        kept = {
            name: {
                part: pages.moved(surveyed.files.read(where).to(surveyed.source.device))
                for part, where in weight.parts.items()
                if part not in weight.fetched(stays)
            }
            for name, weight in each.weights.items()
        }
        stream_module(module, range(first, first + len(lent)), stream, partial(_lent, each.weights, kept, lent, dtype))
        first += len(lent)
        own = plan.drafts(stays)
        if plan.format is not None and own is not None:
            with module.__dict__["streams"]() as there:
                weights = [there._parameters[name] for name in each.weights]
                substitutes.take(module, each.name, formats()[plan.format](), weights, formats()[own]())
    return stream


def _lent(
    weights: Mapping[str, StoredWeight],
    kept: Mapping[str, Mapping[str, Tensor]],
    lent: Sequence[tuple[str, StoredRun]],
    dtype: torch.dtype,
    tensors: Sequence[Tensor],
) -> dict[str, nn.Parameter]:
    """Make the parameters of a module of what is kept of its weights, by weight and part, and what is lent."""
    parts = {name: dict(kept[name]) for name in weights}
    for (name, run), tensor in zip(lent, tensors, strict=True):
        parts[name].update(run.split(tensor))
    return {name: weight.parameter(parts[name], dtype) for name, weight in weights.items()}


CONTEXTS = (4096, 2048, 1024, 512)
"""Contexts to try, in tokens, if the caller names none; the first that fits is used."""


@dataclass(frozen=True)
class PlannedCheckpoint:
    """Holds a survey of a checkpoint, and the plan of what stays in memory, made before weights are read."""

    survey: Survey
    plan: Plan

    def to_dict(self) -> dict[str, Any]:
        """Return the plan and what it is for, ready for JSON."""
        known, plan = self.survey, self.plan
        where = {"device": str(known.source.device), "context": known.context, "cache": known.cache}
        bits = None if plan.format is None else formats()[plan.format].bits
        return {**where, **asdict(plan), "streamed": plan.streamed, "total": plan.total, "bits": bits}


def plan_checkpoint(
    path: str,
    memory: str | int,
    dtype: torch.dtype | str | None,
    draft: bool | Drafter,
    context: int | None,
    source: WeightSource,
    cache: str | None = None,
    weights: Format | None = None,
) -> PlannedCheckpoint:
    """Plan how to load a checkpoint; arguments and errors are those of `selfspec.load`, but for source and format."""
    budget = parse_bytes("memory", memory)
    named_dtype = read_dtype(dtype)
    if context is not None and (type(context) is not int or context < 1):
        raise UnsupportedOptionError(f"context={context!r} is no number of tokens; pass e.g. context=4096")
    if cache is not None and cache not in CACHE_KINDS:
        raise UnsupportedOptionError(f"cache={shown(cache)}: keys and values are kept as {', '.join(CACHE_KINDS)}")
    beside = format_of(draft) if isinstance(draft, Drafter) else None
    inside = drafts_inside(weights)
    if beside is not None and beside not in {**inside, **copies()}:
        raise DraftConfigError(f"{beside} reads a part of packed weights: load with weights='planes', too")
    contexts = CONTEXTS if context is None else (context,)
    surveyed = survey(path, named_dtype, contexts[0], source, weights)
    bandwidth = surveyed.bandwidth()
    # Copies draft where they have room.
    ways = [(surveyed, [*inside, *copies()])] if draft is True else []
    last_draft = WITHOUT_COPIES if draft is True else draft
    if isinstance(last_draft, Drafter):
        surveyed = replace(surveyed, own=last_draft.own_bytes(surveyed.skeleton.model))
    ways.append((surveyed, [] if beside is None else [beside]))

    # Keys and values on the host are exact as well, but slower.
    kinds: list[CacheKind] = ["exact", "host"] if cache is None and surveyed.may_keep("host") else [cache or "exact"]

    def planned(way: tuple[Survey, Sequence[str]], size: int, kept: CacheKind) -> PlannedCheckpoint:
        known, formats = way
        keeping = known.keeping(kept, size)
        return PlannedCheckpoint(keeping, plan_memory(keeping.memory, budget, bandwidth, formats, beside))

    *others, last = product(ways, contexts, kinds)
    for choice in others:
        with suppress(UnsupportedOptionError):
            found = planned(*choice)
            break
    else:
        found = planned(*last)
    there = source.available()
    if there is not None and found.plan.total > there:
        raise UnsupportedOptionError(
            f"memory={shown_bytes(budget)} is more than there is: the plan takes {shown_bytes(found.plan.total)}, and "
            f"{source.name} has {shown_bytes(there)}; ask for less"
        )
    source.check_streamed(found.plan.streamed)
    return found
