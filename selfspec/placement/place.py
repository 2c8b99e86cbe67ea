"""Load a model by a plan: read weights that stay, stream those of other layers, and make substitutes that draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from selfspec.draft import Cascade, Drafter, LowPrecision, PromptLookup
from selfspec.formats.format import formats
from selfspec.model.layer_path import WeightCopy
from selfspec.model.substitutes import Substitutes
from selfspec.placement.drafts import Placement
from selfspec.placement.plan import Plan
from selfspec.placement.skeleton import names_by_weight, set_weight
from selfspec.placement.survey import StreamableModule, Survey
from selfspec.placement.weight_source import FromDisk
from selfspec.placement.weight_stream import WeightStream, stream_module


def place(surveyed: Survey, plan: Plan) -> PreTrainedModel:
    """Read the weights that stay in memory, and let the other layers stream theirs.

    Returns:
        The model, with its `Placement`.

    Raises:
        StorageError: the disk does not give the weights.
    """
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
    return Cascade(PromptLookup(), LowPrecision(format=formats()[plan.format]()))


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
                substitutes.take(module, each.name, WeightCopy(formats()[format]()), lent)
        stream_module(module, list(each.weights), numbers, stream)
    return stream
