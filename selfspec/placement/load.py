"""Loading a checkpoint within a byte budget: layers that fit stay in memory, the others are streamed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from selfspec.control import CostAware
from selfspec.control.costs import Costs
from selfspec.control.draft_policy import DraftChoice, DraftPolicy
from selfspec.draft import Cascade, LowPrecision, PromptLookup
from selfspec.errors import CheckpointError
from selfspec.kernels.rounded import Precision, RoundedWeight
from selfspec.model.adapter import Adapter
from selfspec.model.checkpoint import read_config, local_folder, weight_files
from selfspec.model.registry import find_adapter
from selfspec.model.substitutes import Substitutes, substitutable_weights
from selfspec.model.summary import describe
from selfspec.placement.plan import SLOTS, Bandwidth, Memory, Plan, plan_memory
from selfspec.placement.resident import resident_bytes
from selfspec.placement.skeleton import Skeleton, skeleton
from selfspec.placement.weight_files import ReadBuffer, StoredWeight, WeightFiles, stored_weights
from selfspec.placement.weight_stream import WeightStream, stream_module

_GROUP_SIZE = 32
# Weights that are read and multiplied to see how fast.
_PROBED = 1 << 27
# Prompts are read so many tokens at once at most.
_TOKENS_AT_ONCE = 2048
# What a further token adds to a pass that streams, and all else to a round, in plain steps.
_WIDENING, _OVERHEAD = 0.005, 0.01
_LONGEST = 32
# What allocators hold on to.
_SLACK = 64 * 2**20


@dataclass(frozen=True)
class _Streamable:
    """A module whose weights can be streamed.

    Attributes:
        name: of the module.
        weights: by their names in the module.
    """

    name: str
    weights: dict[str, StoredWeight]


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

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        return


@dataclass(frozen=True)
class Placed:
    """A model that was loaded within a budget.

    Attributes:
        model: some of its layers may take their weights from a stream.
        substitutes: of what is streamed.
        draft: what drafts by default; None: plain decoding.
        plan: what stays in memory.
    """

    model: PreTrainedModel
    substitutes: Substitutes
    draft: DraftPolicy | None
    plan: Plan


def load_placed(name: str, budget: int, dtype: torch.dtype | None, draft: bool, context: int) -> Placed:
    """Load a checkpoint within a budget, on a CPU.

    Args:
        name: a folder.
        budget: the most bytes that the process may take.
        dtype: of the weights; None: the checkpoint's.
        draft: whether substitutes of what is streamed draft.
        context: tokens of prompt and text, of all rows together, that the cache has room for.

    Raises:
        CheckpointError: files are missing, truncated or unreadable.
        UnsupportedModelError: selfspec has no adapter for the architecture.
        UnsupportedOptionError: the budget is too small.
    """
    config, folder = read_config(name), local_folder(name)
    if folder is None:
        raise CheckpointError(f"{name!r} is no folder; download the checkpoint, and give its folder")
    before = resident_bytes() or 0
    weights, files = stored_weights(weight_files(folder)), WeightFiles()
    if dtype is None:
        dtype = config.dtype or next(iter(weights.values())).dtype
    made = skeleton(folder, config, weights, dtype, files)
    layers = _streamable(made, find_adapter(made.model))
    memory = _memory(made, layers, before, context, dtype)
    plan = plan_memory(memory, budget, _bandwidth(weights, files), (8, 4) if draft else ())
    streamed = [module for layer in layers[plan.resident :] for module in layer]
    _fill(made, {f"{module.name}.{weight}" for module in streamed for weight in module.weights}, dtype, files)
    substitutes = Substitutes()
    if streamed:
        _stream(made.model, streamed, plan.bits, substitutes, dtype, files)
    return Placed(made.model, substitutes, _draft(made.model, layers, plan), plan)


def _streamable(made: Skeleton, adapter: Adapter) -> list[list[_Streamable]]:
    """The modules of each layer that can be streamed; those of the head are a layer after the last."""
    prefix = ".".join(adapter.path(made.model))
    depth = len(adapter.decoder_layers(made.model))
    layers: list[list[_Streamable]] = [[] for _ in range(depth + 1)]
    tied = _names_by_weight(made.model)
    for name, weights in substitutable_weights(made.model, adapter).items():
        stored = {weight: made.stored.get(f"{name}.{weight}") for weight in weights}
        shared = any(len(tied[id(made.model.get_parameter(f"{name}.{weight}"))]) > 1 for weight in weights)
        if shared or None in stored.values():
            continue
        inside = name.removeprefix(f"{prefix}.").split(".")[0]
        number = int(inside) if name.startswith(f"{prefix}.") else depth
        layers[number].append(_Streamable(name, {each: made.stored[f"{name}.{each}"] for each in weights}))
    return layers


def _names_by_weight(model: PreTrainedModel) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return names


def _memory(
    made: Skeleton, layers: Sequence[Sequence[_Streamable]], before: int, context: int, dtype: torch.dtype
) -> Memory:
    summary = describe(made.model)
    of_layers = [[weight for module in layer for weight in module.weights.values()] for layer in layers]
    sizes = [sum(_bytes_as(weight, dtype) for weight in layer) for layer in of_layers]
    widest = max((sum(weight.shape[-2:]) for layer in of_layers for weight in layer), default=0)
    return Memory(
        process=before,
        kept=sum(weight.nbytes for weight in made.model.parameters()) - sum(sizes),
        layers=tuple(sizes),
        largest=max((weight.nbytes for layer in of_layers for weight in layer), default=0),
        substitutes={
            bits: tuple(
                sum(
                    RoundedWeight.empty(weight.shape, Precision(bits, _GROUP_SIZE), torch.device("meta")).nbytes
                    for weight in layer
                )
                for layer in of_layers
            )
            for bits in (8, 4)
        },
        cache=summary.cache.bytes_per_token * context,
        working=_SLACK + 2 * widest * min(context, _TOKENS_AT_ONCE) * dtype.itemsize,
    )


def _bytes_as(weight: StoredWeight, dtype: torch.dtype) -> int:
    return weight.nbytes // weight.dtype.itemsize * dtype.itemsize


def _bandwidth(weights: dict[str, StoredWeight], files: WeightFiles) -> Bandwidth:
    """How fast the largest weights are read, and multiplied."""
    probed: list[StoredWeight] = []
    for weight in sorted(weights.values(), key=lambda weight: -weight.nbytes):
        if probed and sum(each.nbytes for each in probed) + weight.nbytes > _PROBED:
            break
        probed.append(weight)
    buffer, seconds = ReadBuffer(probed[0].nbytes), 0.0
    for weight in probed:
        begun = time.perf_counter()
        read = buffer.read(files, weight)
        seconds += time.perf_counter() - begun
    flat = read.reshape(-1, read.shape[-1])
    row = flat.new_zeros(flat.shape[1])
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        torch.mv(flat, row)
        times.append(time.perf_counter() - begun)
    return Bandwidth(flat.nbytes / min(times), sum(weight.nbytes for weight in probed) / seconds)


def _fill(made: Skeleton, streamed: set[str], dtype: torch.dtype, files: WeightFiles) -> None:
    """Read all weights that stay."""
    names = _names_by_weight(made.model)
    for same in names.values():
        stored = next((made.stored[name] for name in same if name in made.stored), None)
        if stored is None or streamed.intersection(same):
            continue
        read: Tensor = ReadBuffer(stored.nbytes).read(files, stored).to(dtype)
        weight = nn.Parameter(read, requires_grad=False)
        for name in same:
            holder, _, leaf = name.rpartition(".")
            made.model.get_submodule(holder)._parameters[leaf] = weight


def _stream(
    model: PreTrainedModel,
    modules: Sequence[_Streamable],
    bits: int | None,
    substitutes: Substitutes,
    dtype: torch.dtype,
    files: WeightFiles,
) -> None:
    """Let modules take their weights from a stream, and make their substitutes."""
    weights = [weight for module in modules for weight in module.weights.values()]
    stream = WeightStream(weights, SLOTS, dtype, files)
    first = 0
    for each in logging.tqdm(modules, desc="Reading weights that are streamed", disable=bits is None):
        module, numbers = model.get_submodule(each.name), range(first, first + len(each.weights))
        first += len(each.weights)
        if bits is not None:
            with stream.lend(numbers) as lent:
                substitutes.take(module, each.name, Precision(bits, _GROUP_SIZE), lent)
        stream_module(module, list(each.weights), list(numbers), stream)


def _draft(model: PreTrainedModel, layers: Sequence[Sequence[_Streamable]], plan: Plan) -> StreamedDraft | None:
    depth = len(layers) - 1
    if plan.bits is None or plan.draft_step is None or plan.resident >= depth:
        return None
    low = _StandIn(plan.bits, _GROUP_SIZE, range(plan.resident, depth), head=bool(layers[depth]))
    costs = Costs(plan.draft_step, verify=1.0, widening=_WIDENING, overhead=_OVERHEAD)
    return StreamedDraft(Cascade(PromptLookup(), low), _LONGEST, costs)
