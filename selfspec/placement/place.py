"""Load a checkpoint within a budget: plan, read what stays, stream the rest, and make substitutes that draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from selfspec.arguments import shown
from selfspec.cache.shared_layer import CACHE_KINDS, CacheKind
from selfspec.draft import Cascade, Drafter, LowPrecision, PromptLookup
from selfspec.errors import UnsupportedOptionError
from selfspec.formats.format import copies
from selfspec.model.layer_path import WeightCopy
from selfspec.model.substitutes import Substitutes
from selfspec.placement.drafts import Placement, format_of
from selfspec.placement.plan import Plan, parse_bytes, plan_memory, shown_bytes
from selfspec.placement.skeleton import DTYPES, names_by_weight, set_weight
from selfspec.placement.survey import StreamableModule, Survey, survey
from selfspec.placement.weight_source import FromDisk, WeightSource
from selfspec.placement.weight_stream import WeightStream, stream_module


def place(surveyed: Survey, plan: Plan) -> PreTrainedModel:
    """Read the weights that stay in memory, and let the other layers stream theirs."""
    surveyed.source.prepare()
    made = surveyed.skeleton
    streamed = [module for layer in surveyed.layers[plan.resident :] for module in layer]
    away = {f"{module.name}.{weight}" for module in streamed for weight in module.weights}
    for names in names_by_weight(made.model).values():
        if names[0] in made.deferred and not away.intersection(names):
            weight = made.deferred[names[0]].values().to(surveyed.source.device)
            set_weight(made.model, names, nn.Parameter(weight, requires_grad=False))
    _move_what_is_there(made.model, surveyed.source.device)
    substitutes = Substitutes.of(made.model)
    stream = _stream(surveyed, streamed, plan.format, substitutes) if streamed else None
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


def default_draft(plan: Plan) -> Drafter | None:
    """Return the default draft: look-ups, and rounded copies of streamed layers; None if there are no such copies."""
    if plan.format is None or not plan.streamed:
        return None
    return Cascade(PromptLookup(), LowPrecision(format=copies()[plan.format]()))


def _move_what_is_there(model: PreTrainedModel, device: torch.device) -> None:
    """Move buffers, and weights that the loader of `transformers` made, to the device."""
    for names in names_by_weight(model).values():
        weight = model.get_parameter(names[0])
        if not weight.is_meta and weight.device != device:
            set_weight(model, names, nn.Parameter(weight.to(device), requires_grad=False))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _stream(
    surveyed: Survey, modules: Sequence[StreamableModule], format: str | None, substitutes: Substitutes
) -> WeightStream:
    """Make modules take their weights from a stream, and make their substitutes."""
    weights = [weight for module in modules for weight in module.weights.values()]
    sizes = [weight.nbytes // weight.dtype.itemsize * surveyed.dtype.itemsize for weight in weights]
    stream = WeightStream(sizes, surveyed.source.slots(weights, surveyed.dtype, surveyed.files))
    first = 0
    for each in logging.tqdm(modules, desc="Rounding streamed weights", delay=2, disable=format is None):
        module = surveyed.skeleton.model.get_submodule(each.name)
        numbers = range(first, first + len(each.weights))
        first += len(each.weights)
        if format is not None:
            with stream.lend(numbers) as lent:
                substitutes.take(module, each.name, WeightCopy(copies()[format]()), lent)
        stream_module(module, list(each.weights), numbers, stream)
    return stream


CONTEXTS = (4096, 2048, 1024, 512)
"""Contexts to try, in tokens, if the caller names none; the first that fits is used."""


@dataclass(frozen=True)
class PlannedCheckpoint:
    """Holds a survey of a checkpoint, and the plan of what stays in memory, made before weights are read."""

    survey: Survey
    plan: Plan

    def to_dict(self) -> dict[str, Any]:
        """Return the plan and what it is for, ready for JSON."""
        known = self.survey
        where = {"device": str(known.source.device), "context": known.context, "cache": known.cache}
        bits = None if self.plan.format is None else copies()[self.plan.format].bits
        return {**where, "memory": asdict(known.memory), **asdict(self.plan), "bits": bits}


def plan_checkpoint(
    path: str,
    memory: str | int,
    dtype: torch.dtype | str | None,
    draft: bool | Drafter,
    context: int | None,
    source: WeightSource,
    cache: str | None = None,
) -> PlannedCheckpoint:
    """Plan how to load a checkpoint; arguments and errors are those of `selfspec.load`, but for the source."""
    budget = parse_bytes("memory", memory)
    named_dtype = read_dtype(dtype)
    if context is not None and (type(context) is not int or context < 1):
        raise UnsupportedOptionError(f"context={context!r} is no number of tokens; pass e.g. context=4096")
    if cache is not None and cache not in CACHE_KINDS:
        raise UnsupportedOptionError(f"cache={shown(cache)}: keys and values are kept as {', '.join(CACHE_KINDS)}")
    beside = format_of(draft) if isinstance(draft, Drafter) else None
    named_formats = list(copies()) if draft is True else [] if beside is None else [beside]
    contexts = CONTEXTS if context is None else (context,)
    surveyed = survey(path, named_dtype, contexts[0], source)
    if isinstance(draft, Drafter):
        surveyed = replace(surveyed, own=draft.own_bytes(surveyed.skeleton.model))
    bandwidth = surveyed.bandwidth()

    # Keys and values on the host are exact as well, but slower.
    others: list[CacheKind] = ["host"] if cache is None and surveyed.may_keep("host") else []
    kinds = [cache or "exact", *others]

    def planned(size: int, kept: CacheKind) -> PlannedCheckpoint:
        keeping = surveyed.keeping(kept, size)
        return PlannedCheckpoint(keeping, plan_memory(keeping.memory, budget, bandwidth, named_formats, beside))

    found = _first_that_fits(planned, list(product(contexts, kinds)))
    there = source.available()
    if there is not None and found.plan.total > there:
        raise UnsupportedOptionError(
            f"memory={shown_bytes(budget)} is more than there is: the plan takes {shown_bytes(found.plan.total)}, and "
            f"{source.name} has {shown_bytes(there)}; ask for less"
        )
    source.check_streamed(found.plan.streamed)
    return found


def _first_that_fits(
    planned: Callable[[int, CacheKind], PlannedCheckpoint], choices: Sequence[tuple[int, CacheKind]]
) -> PlannedCheckpoint:
    for size, kept in choices[:-1]:
        with suppress(UnsupportedOptionError):
            return planned(size, kept)
    return planned(*choices[-1])


def read_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype of weights or the dtype of its name; None: the checkpoint's own. Refuse any other."""
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return None
    named = {str(each).removeprefix("torch."): each for each in DTYPES}
    found = named.get(dtype) if isinstance(dtype, str) else dtype
    if found in DTYPES:
        return found
    raise UnsupportedOptionError(f"dtype={shown(dtype)}: weights are {', '.join(named)}, or auto, the checkpoint's own")
