"""Say what a checkpoint can do on this machine: whether it fits, how `auto` drafts and gains, what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from transformers import PreTrainedConfig

from selfspec.control.profile import UNCALIBRATED, Profile, Setting, clear_gain, find_profile, folder
from selfspec.draft.registry import PLAIN, draft_name
from selfspec.errors import CheckpointError, ProfileError, UnsupportedModelError
from selfspec.formats.format import Format
from selfspec.measure.summary import ModelSummary, Weights
from selfspec.model.checkpoint import local_folder, weight_files
from selfspec.model.registry import find_adapter, has_encoder, without_weights
from selfspec.model.sizes import widening
from selfspec.placement.packed import exact_format, has_packed_weights
from selfspec.placement.quantised import quantisation_of, why_not_read
from selfspec.placement.stored import StoredTensor, stored_tensors
from selfspec.placement.survey import Survey
from selfspec.placement.whole import budget_within, hold_packed, load_whole

_TOKENS = 4096


def counted_tokens(context: int | None) -> int:
    """Return how many tokens an account of memory is of: 4,096, and no more than the model was made for."""
    return _TOKENS if context is None else min(context, _TOKENS)


@dataclass(frozen=True)
class Gain:
    """What `auto` drafts with, and its speed-up over plain decoding.

    Attributes:
        draft: its name; `none` where nothing drafts.
    """

    draft: str
    speedup: float


@dataclass(frozen=True)
class CheckpointProspects:
    """What a checkpoint can do here.

    Attributes:
        device: that commands take by themselves.
        memory: of it, in bytes; null: the system does not tell.
        account: bytes at the peak of a text of `counted_tokens`, by what they are for.
        fits: whether the memory holds their sum.
        greedy: how `auto` decodes greedily.
        sampled: how it samples.
        profile: that gains were measured for; null: they are estimates, by the weights that drafts read.
        doubt: why `auto` cannot be used; empty: it can.
        commands: to give next, the most useful first.
        packed: bytes of its weights in planes, on a CPU; null: they do not pack, or are not here.
        weights: the format in which they are in the folder, or asked for; null: they are dense.
        unread: what no kernel reads of quantised weights, which run as their library loads them; null: nothing.
    """

    device: str
    memory: int | None
    account: dict[str, int]
    fits: bool
    greedy: Gain
    sampled: Gain
    profile: str | None
    doubt: str
    commands: tuple[str, ...]
    packed: int | None
    weights: str | None
    unread: str | None


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary(ModelSummary):
    """`selfspec MODEL` and `selfspec inspect MODEL`: bytes are those in memory.

    Attributes:
        here: what it can do on this machine.
        mtp: modules for multi-token prediction that its config promises; null: none.
        plan: with --memory: what would stay, what is streamed, and how fast.
    """

    checkpoint: str
    here: CheckpointProspects
    mtp: int | None = None
    plan: dict[str, Any] | None = None


def prospects(
    name: str, place: str, surveyed: Survey, summary: ModelSummary, format: Format | None = None
) -> CheckpointProspects:
    """Say what a checkpoint can do on this machine. Its survey is of `counted_tokens`; a profile may need its weights.

    With a format the survey's model holds packed weights.
    """
    model, device = surveyed.skeleton.model, surveyed.source.device
    encodes = has_encoder(model)
    where = local_folder(place)
    in_folder = has_packed_weights(place)
    packs = where is not None and not in_folder and has_bfloat16_precision(where, model.config)
    if format is not None and not in_folder and not packs:
        raise UnsupportedModelError(
            f"weights={format.name!r}: {name} has weights with more bits than bfloat16, or no weights here; leave "
            "weights out"
        )
    memory = surveyed.source.available()
    default = UNCALIBRATED.format
    assert default is not None
    copies = next(each.bytes for each in summary.substitutes if each.format == default.name)
    # Copies of what a library runs in fewer bits, or lies in fewer here, are read no faster.
    by_library = quantisation_of(model.config) is not None
    cost = 1.0 if by_library or not copies else copies / summary.target_bytes_read
    gain = clear_gain(cost, device, widening(model, find_adapter(model)))
    split = surveyed.memory.whole(None if gain is None else default.name)
    fits = memory is None or split.total <= memory
    budget = None if memory is None or fits else budget_within(surveyed, memory)
    profile, doubt = None, ""
    if fits and not encodes:
        try:
            profile = _profile(place, type(model).__name__, format)
        except ProfileError as error:
            doubt = str(error)
    if profile is None:
        greedy = sampled = Gain(PLAIN, 1.0) if gain is None else Gain(draft_name(UNCALIBRATED), gain)
    else:
        greedy, sampled = (Gain(each.draft, each.speedup[0]) for each in (profile.greedy, profile.sampled))
    packed = None
    if format is not None:
        packed = summary.total.bytes
    elif packs and device.type == "cpu":
        packed = packed_bytes(model.config, exact_format("planes"))
    unread = None
    if by_library and where is not None:
        unread = why_not_read(where, model.config) or f"quantised weights on {device.type}"
    words = quote(name) + ("" if format is None or in_folder else f" --weights {format.name}")
    return CheckpointProspects(
        device=str(device),
        memory=memory,
        account={what: size for what, size in split.account.items() if size},
        fits=fits,
        greedy=greedy,
        sampled=sampled,
        profile=None if profile is None else profile.source,
        doubt=doubt,
        commands=tuple(_commands(words, encodes, budget, profile is not None or not fits)),
        packed=packed,
        weights=None if format is None else format.name,
        unread=unread,
    )


def packed_bytes(config: PreTrainedConfig, format: Format) -> int:
    """Return the bytes of a model's weights, packed where they fit, without what depends on values."""
    model = without_weights(config)
    hold_packed(model, format)
    return Weights.of(model.parameters()).bytes


# Weights of a checkpoint that are looked at, and their first bytes.
_LOOKED_AT, _FIRST = 8, 1 << 16


def has_bfloat16_precision(folder: Path, config: PreTrainedConfig) -> bool:
    """Return whether some weights of a checkpoint, by their first numbers, have no more bits than bfloat16."""
    try:
        weights = [each for each in stored_tensors(weight_files(folder, config)).values() if len(each.shape) > 1]
    except CheckpointError:
        return False
    return bool(weights) and all(map(_looks_short, weights[:: max(1, len(weights) // _LOOKED_AT)]))


def _looks_short(weight: StoredTensor) -> bool:
    if weight.dtype != torch.float32:
        return weight.dtype == torch.bfloat16
    with weight.file.open("rb") as opened:
        opened.seek(weight.start)
        first = bytearray(opened.read(min(weight.nbytes, _FIRST)))
    return not (torch.frombuffer(first, dtype=torch.int32) & 0xFFFF).any()


def _profile(place: str, class_name: str, format: Format | None) -> Profile | None:
    classes = set()
    for file in folder().glob("*.json"):
        with suppress(ProfileError):
            classes.add(Profile.load(file).setting.model)
    if class_name not in classes:
        return None
    weights = None if format is None or has_packed_weights(place) else format.name
    return find_profile(Setting.of(load_whole(place, weights)))


def _commands(name: str, encodes: bool, budget: str | None, calibrated: bool) -> Iterator[str]:
    if encodes:
        yield 'selfspec.wrap(model, draft="int8").generate(**inputs)  # in Python'
        return
    if budget is None and not calibrated:
        yield f"selfspec calibrate {name}"
    yield f"selfspec generate {name}{'' if budget is None else ' --memory ' + budget} --prompt TEXT"
