"""Load a checkpoint whole: one weight at a time is on its way, and what all takes is counted before any is read.

Where memory is free, weights are copied to large pages. Where it is short, they are pages of the mapped files, which
processes share, and which the system may take back and read again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.draft.drafter import Drafter
from selfspec.errors import CheckpointError, UnsupportedOptionError
from selfspec.formats.format import Format, copies
from selfspec.kernels.large_pages import LargePages
from selfspec.model.checkpoint import downloaded, load_to_device, local_folder, read_config, weight_files
from selfspec.model.gguf import is_gguf
from selfspec.model.registry import find_adapter, without_weights
from selfspec.placement.packed import (
    deferred_weights,
    device_of,
    fill,
    format_of_weights,
    has_packed_weights,
    is_transposed,
    warn_without_kernels,
)
from selfspec.placement.plan import Split, shown_bytes
from selfspec.placement.quantised import quantisation_of
from selfspec.placement.skeleton import Skeleton, names_by_weight, read_dtype, set_weight
from selfspec.placement.stored import MappedFiles, StoredWeight, is_packed, stored_tensors
from selfspec.placement.survey import Survey, survey
from selfspec.placement.weight_source import FromDisk, WeightSource, source_for
from selfspec.process import free_bytes, give_large_blocks_back

# Of the memory there is, what a budget takes: the rest is for the system.
_OF_MEMORY = 0.85
CONTEXT = 512
"""Tokens of prompt and text that a model is loaded for where nobody says how many."""


def load_whole(
    name: str,
    weights: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    draft: Drafter | None = None,
    context: int = CONTEXT,
) -> PreTrainedModel:
    """Load the model of a checkpoint to a device, in evaluation mode; its peak is the model and one more weight.

    Modules stay those of `transformers`. With a format, linear layers and embeddings hold packed weights, which compute
    the same to the last bit; their `state_dict` has dense weights. What lies packed in files, by `selfspec pack`, in
    GGUF or as another library quantised it, stays so where kernels read it. All else `transformers` loads.

    Raises:
        UnsupportedOptionError: the memory there is does not hold the model, `context` tokens and what the draft takes.
        CheckpointError, UnsupportedModelError: as in `selfspec.load`.
    """
    format = format_of_weights(name, weights)
    place = device_of(format, device)
    # What other devices have is not known.
    is_counted = place.type in ("cpu", "cuda")
    if is_counted or format is not None:
        surveyed = survey_whole(name, dtype, context, source_for(place) if is_counted else FromDisk(), format)
        split = account(surveyed, draft)
        if is_counted:
            check_room(name, surveyed, split)
        if local_folder(name) is None:
            return load_whole(str(downloaded(name)), weights, dtype, device, draft, context)
        if surveyed.skeleton.deferred:
            return _filled(surveyed, format, split, place)
    return load_to_device(name, read_dtype(dtype) or "auto", place)


def _filled(surveyed: Survey, format: Format | None, split: Split, place: torch.device) -> PreTrainedModel:
    made = surveyed.skeleton
    if format is None and surveyed.packed:
        warn_without_kernels("quantised weights", place)
    give_large_blocks_back()
    given, pages = deferred_weights(made, format), LargePages()

    def moved(name: str) -> Tensor | StoredWeight:
        found = given[name]()
        return pages.moved(found.to(place)) if isinstance(found, Tensor) else found

    roomy = format is None and free_bytes() >= split.account["for weights that stay"]
    weights = {name: partial(moved, name) for name in given} if roomy else given
    fill(made.model, format, weights, surveyed.files, place)
    return made.model


def survey_whole(
    name: str, dtype: torch.dtype | str | None, context: int, source: WeightSource, format: Format | None = None
) -> Survey:
    """Survey a checkpoint that is to be whole in memory, by the headers of its files; its model holds what is packed.

    A model on the hub is surveyed by its configuration, before it is downloaded, and one whose library runs its
    quantised weights by what lies in the files: nothing of them is deferred.
    """
    config, folder, named = read_config(name), local_folder(name), read_dtype(dtype)
    here = folder is not None and has_weights(folder, config)
    library = quantisation_of(config) is not None and not has_packed_weights(name, source.device)
    adapted = folder is not None and (folder / "adapter_config.json").is_file()
    if (folder is not None and format is not None) or (here and not library and not adapted):
        found = survey(name, named, context, source, files=MappedFiles())
        hold_packed(found.skeleton.model, format, found.packed)
        return replace(found, pieces=False)
    model = without_weights(config)
    if folder is not None and here and library:
        hold_sizes(model, folder)
    layers = ((),) * (len(find_adapter(model).decoder_layers(model)) + 1)
    made, kept = Skeleton(model, {}, {}), named or model.dtype
    return Survey(made, kept, MappedFiles(), layers, source.in_use(), context, source, pieces=False)


def has_weights(folder: Path, config: PreTrainedConfig) -> bool:
    """Return whether a folder has the weights of its checkpoint, which may be elsewhere."""
    try:
        return is_gguf(folder) or is_packed(folder) or bool(weight_files(folder, config))
    except CheckpointError:
        return False


class SizedWeight(nn.Parameter):
    """Stands on the meta device for a weight that takes other bytes than its shape and dtype say."""

    stored = 0

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes in the files."""
        return self.stored


def hold_packed(
    model: PreTrainedModel, format: Format | None, stored: Mapping[str, StoredWeight] | None = None
) -> None:
    """Let a model on the meta device hold packed weights, by first names, and in a format all that fit it by shape."""
    for names in names_by_weight(model).values():
        weight, transposed = model.get_parameter(names[0]), is_transposed(model, names)
        where = (stored or {}).get(names[0])
        laid_out = weight.mT if transposed else weight
        if where is not None and where.format is not None:
            empty = where.format.empty(where.shape, weight.device)
            set_weight(model, names, where.parameter(empty.parts, weight.dtype))
        elif format is not None and transposed is not None and format.takes(laid_out):
            empty = format.empty(laid_out.shape, weight.device)
            set_weight(model, names, format.parameter(empty, weight.dtype, transposed))


def hold_sizes(model: PreTrainedModel, folder: Path) -> None:
    """Let parameters of a model on the meta device say what they take in files, which may have several tensors for one.

    What belongs to no module of the model is left out.
    """
    modules, sizes = dict(model.named_modules()), Counter[str]()
    for name, tensor in stored_tensors(weight_files(folder, model.config)).items():
        holder, _, leaf = name.rpartition(".")
        while holder not in modules:
            holder = holder.rpartition(".")[0]
        own = modules[holder]._parameters
        sizes[f"{holder}.{leaf if leaf in own else next(iter(own), None)}"] += tensor.nbytes
    for names in names_by_weight(model).values():
        if names[0] in sizes:
            weight = SizedWeight(model.get_parameter(names[0]).detach(), requires_grad=False)
            weight.stored = sizes[names[0]]
            set_weight(model, names, weight)


def account(surveyed: Survey, draft: Drafter | None) -> Split:
    """Count the bytes of a whole checkpoint in memory, with those of a draft."""
    if draft is None:
        return surveyed.memory.whole(None)
    own = draft.own_bytes(surveyed.skeleton.model)
    name = None if draft.format is None else draft.format.name
    return replace(surveyed, own=own).memory.whole(name if name in copies() else None)


def check_room(name: str, surveyed: Survey, split: Split) -> None:
    """Refuse to load what the memory there is does not hold."""
    there = surveyed.source.available()
    if there is not None and split.total > there:
        size = budget_within(surveyed, there)
        remedy = "neither can it be streamed in that: take a checkpoint in fewer bits"
        if size is not None:
            remedy = f"stream what does not fit: selfspec.load(..., memory={size!r}), --memory {size}"
        raise UnsupportedOptionError(
            f"{name} takes {shown_bytes(split.total)} with {surveyed.context:,} tokens ({split.told}), and "
            f"{surveyed.source.name} has {shown_bytes(there)}; {remedy}"
        )


def budget_within(surveyed: Survey, there: int) -> str | None:
    """Return the budget to stream a checkpoint within the memory there is; None: there is too little, or it cannot."""
    size, least = int(_OF_MEMORY * there), replace(surveyed, context=min(CONTEXT, surveyed.context), pieces=True)
    streams = surveyed.skeleton.deferred and Split(least.memory, 0, None).total <= size
    return f"{size // 2**20}MiB" if streams else None
