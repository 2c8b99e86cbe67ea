"""Estimate from headers, before weights are read, what memory a checkpoint takes and what of it can be streamed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from transformers import PreTrainedConfig

from selfspec.cache.cursors import BUCKET, MOST_GRAPHS, WIDEST_ROUND
from selfspec.cache.shared_cache import recurrent_layers
from selfspec.cache.shared_layer import CacheKind
from selfspec.device import has_graphs
from selfspec.draft.drafter import OwnBytes
from selfspec.errors import CheckpointError, UnsupportedModelError, UnsupportedOptionError
from selfspec.formats.format import Format, copies
from selfspec.model.checkpoint import local_folder, read_config
from selfspec.model.identity import vocabulary_size
from selfspec.model.registry import find_adapter
from selfspec.model.sizes import layer_caches
from selfspec.model.substitutes import substitutable_weights
from selfspec.placement.packed import packed_on_disk
from selfspec.placement.plan import SLOTS, Bandwidth, Memory, Stays
from selfspec.placement.skeleton import Skeleton, names_by_weight, skeleton
from selfspec.placement.stored import StoredWeight, WeightFiles, drafts_inside
from selfspec.placement.weight_source import WeightSource

# Bytes that allocators do not give back.
_SLACK = 96 * 2**20
# Bytes of what captured passes compute in between, and of what kernels set up on the stream that captures.
_GRAPHS = 64 * 2**20
# Tokens that captured passes over one number of slots read, of all widths together, each with its logits.
_CAPTURED = 1 + WIDEST_ROUND // 2 + WIDEST_ROUND
# Bytes of the scale of a token's keys, or values, in one head.
_SCALE = 2
# Numbers of a pass's mask that fit in the slack.
_MASKED_IN_SLACK = 4 * 2**20
# Bytes of each score that eager attention holds at once: the product, with the mask, in float32, and the result.
_OF_SCORE = 16
# States of a prompt that a layer holds at once, each as wide as the inputs and outputs of its widest product together:
# three of the MLP, and some of the layer and its attention.
_STATES = 4
# The most tokens of prompts in a pass, of all rows together, and the most numbers in its mask or scores.
_TOKENS_AT_ONCE, _SCORED = 1024, 32 * 2**20


@dataclass(frozen=True)
class StreamableModule:
    """Describes a module that can be streamed: its weights, by name in it, and bytes of its substitute, by format."""

    name: str
    weights: dict[str, StoredWeight]
    substitutes: dict[str, int]


@dataclass(frozen=True)
class Survey:
    """Describes a model without its weights, by headers alone, and a way to run it.

    Attributes:
        layers: streamable modules of each layer, those of the head after the last layer.
        process: bytes within the budget that were in use before.
        context: tokens of all rows together that the memory has room for.
        own: bytes of a draft beside the model.
        packed: packed weights, by their first names.
        pieces: whether prompts are read in pieces, which a budget does.
    """

    skeleton: Skeleton
    dtype: torch.dtype
    files: WeightFiles
    layers: tuple[tuple[StreamableModule, ...], ...]
    process: int
    context: int
    source: WeightSource
    cache: CacheKind = "exact"
    own: OwnBytes = field(default_factory=OwnBytes)
    packed: Mapping[str, StoredWeight] = field(default_factory=dict)
    pieces: bool = True

    @property
    def inside(self) -> dict[str, type[Format]]:
        """The formats, by name, that draft by a part of packed weights."""
        return drafts_inside(next((weight.format for weight in self.packed.values()), None))

    @property
    def at_once(self) -> int:
        """The most tokens of prompts that a pass reads, of all rows together."""
        if not self.pieces:
            return self.context
        scored_heads = max(1, _scored_heads(self.skeleton.model.config))
        return max(1, min(_TOKENS_AT_ONCE, self.context, _SCORED // (self.context * scored_heads)))

    def bandwidth(self) -> Bandwidth:
        """Measure how fast weights are streamed and multiplied."""
        weights = (self.packed or self.skeleton.stored).values()
        return self.source.bandwidth([part for each in weights for part in each.parts.values()], self.files)

    def may_keep(self, cache: CacheKind) -> bool:
        """Return whether keys and values can be kept in this way."""
        return cache in self.source.caches and not recurrent_layers(self.skeleton.model.config)

    def keeping(self, cache: CacheKind, context: int) -> Survey:
        """Return the survey with another context, and another way to keep keys and values."""
        if cache not in self.source.caches:
            known = " or ".join(self.source.caches)
            raise UnsupportedOptionError(
                f"cache={cache!r}: on {self.source.device.type} keys and values are {known}; leave it out"
            )
        model = self.skeleton.model
        if cache != "exact" and recurrent_layers(model.config):
            raise UnsupportedModelError(
                f"cache={cache!r}: layers of {type(model).__name__} have states, which stay as they are; leave it out"
            )
        return replace(self, cache=cache, context=context)

    @cached_property
    def memory(self) -> Memory:
        """Memory that the model takes."""
        dtype, context = self.dtype, self.context
        of_layers = [[weight for module in layer for weight in module.weights.values()] for layer in self.layers]
        sizes = [sum(weight.nbytes(dtype, weight.fetched()) for weight in layer) for layer in of_layers]
        weights = [weight for layer in of_layers for weight in layer]
        # A module uses up to two weights at once.
        copied = [self._copied_bytes(weight) for weight in weights]
        # The head does not read prompts.
        widest = max((sum(weight.shape[-2:]) for layer in of_layers[:-1] for weight in layer), default=0)
        config, depth = self.skeleton.model.config, len(self.layers) - 1
        caches = layer_caches(config.get_text_config(decoder=True), depth)
        graphs = 0
        if has_graphs(self.source.device):
            # Passes see whole buckets of slots.
            context += BUCKET - 1
            vocabulary = vocabulary_size(self.skeleton.model)
            graphs = _GRAPHS + min(context // BUCKET, MOST_GRAPHS) * _CAPTURED * vocabulary * dtype.itemsize
        exact = context * dtype.itemsize * sum(each.numbers for each in caches)
        rounded = context * sum(each.numbers + 2 * each.heads * _SCALE for each in caches)
        cache = {"exact": exact, "host": 0, "int8": rounded}[self.cache]
        states = _STATES * widest * self.at_once * dtype.itemsize
        # The mask in the dtype, and what it is made from.
        masks = max(0, self.at_once * context - _MASKED_IN_SLACK) * (dtype.itemsize + 2)
        scores = self.at_once * context * _scored_heads(config) * _OF_SCORE
        # Where keys and values are kept in another way, a pass copies one layer of them at a time.
        copied_cache = 0 if self.cache == "exact" else exact // max(depth, 1)
        passes = states + masks + scores + 2 * max(copied, default=0) + copied_cache
        moving = max((max(module.substitutes.values()) for layer in self.layers for module in layer), default=0)
        # Copies are made of dense weights.
        moving += max((each.shape.numel() * dtype.itemsize for each in weights if each.format is not None), default=0)
        # While weights are made, there are no keys and values, and no passes.
        beside = max((weight.nbytes_beside for weight in self.skeleton.deferred.values()), default=0)
        loading = beside - cache if self.source.device.type == "cpu" else 0
        return Memory(
            process=self.process,
            kept=sum(
                self.packed[name].nbytes(dtype) if name in self.packed else weight.nbytes
                for name, weight in self.skeleton.model.named_parameters()
            )
            - sum(sizes),
            layers=tuple(sizes),
            largest=max(
                (
                    run.whole.numel * self.source.dtype_in_slots(run.whole.dtype, dtype).itemsize
                    for weight in weights
                    for run in weight.runs()
                ),
                default=0,
            ),
            substitutes={
                name: tuple(sum(module.substitutes[name] for module in layer) for layer in self.layers)
                for name in copies()
            },
            cache=cache,
            working=_SLACK + graphs + max(passes, loading, moving),
            draft=self.own.weights + self.own.row + self.own.token * context,
            kept_substitutes=_kept_substitutes(self.skeleton, self.layers),
            parts={
                name: tuple(
                    sum(
                        weight.nbytes(dtype, set(weight.fetched()) - set(weight.fetched(Stays.PART)))
                        for weight in layer
                    )
                    for layer in of_layers
                )
                for name in self.inside
            },
        )

    def _copied_bytes(self, weight: StoredWeight) -> int:
        """Count the bytes of copies that a module makes of a weight that is fetched, to multiply by it."""
        source, dtype = self.source, self.dtype
        if weight.format is not None:
            return weight.format.joined_bytes(weight.shape, dtype, source.device)
        is_copied = any(source.dtype_in_slots(part.dtype, dtype) != dtype for part in weight.parts.values())
        return weight.shape.numel() * max(4, dtype.itemsize) if is_copied else 0


def survey(
    name: str,
    dtype: torch.dtype | None,
    context: int,
    source: WeightSource,
    format: Format | None = None,
    files: WeightFiles | None = None,
) -> Survey:
    """Survey a checkpoint in a folder, for a context of all rows together; dtype None: the checkpoint's own.

    With a format weights are packed first, to a file.
    """
    config, folder = read_config(name), local_folder(name)
    if folder is None:
        raise CheckpointError(f"{name!r} is no folder; download the checkpoint, and give its folder")
    files = files or WeightFiles()
    made = skeleton(folder, config, dtype, files)
    # With the code of the model, which comes with it.
    before = source.in_use()
    packed = packed_on_disk(made, format, files)
    layers = streamable_layers(made, packed)
    return Survey(made, made.model.config.dtype, files, layers, before, context, source, packed=packed)


def streamable_layers(made: Skeleton, packed: Mapping[str, StoredWeight]) -> tuple[tuple[StreamableModule, ...], ...]:
    """Return the streamable modules of each layer; those of the head are a layer after the last.

    Where weights are packed, others are not streamed.
    """
    places = packed or made.stored
    adapter = find_adapter(made.model)
    prefix = ".".join(adapter.path(made.model))
    depth = len(adapter.decoder_layers(made.model))
    layers: list[list[StreamableModule]] = [[] for _ in range(depth + 1)]
    tied = names_by_weight(made.model)
    for name, shapes in substitutable_weights(made.model, adapter).items():
        found = {weight: places.get(f"{name}.{weight}") for weight in shapes}
        stored = {weight: where for weight, where in found.items() if where is not None}
        shared = any(len(tied[id(made.model.get_parameter(f"{name}.{weight}"))]) > 1 for weight in shapes)
        # Weights without substitutes stay: every draft step runs them.
        if shared or len(stored) < len(shapes) or not _fits(shapes.values()):
            continue
        number = int(name.removeprefix(f"{prefix}.").split(".")[0]) if name.startswith(f"{prefix}.") else depth
        layers[number].append(StreamableModule(name, stored, _packed_bytes(shapes.values())))
    *before, head = layers
    wide, others = _largest([head]), _largest(before)
    if SLOTS * (wide - others) > wide:
        # Slots that hold the head would take more memory than the head itself.
        layers[depth] = []
    return tuple(map(tuple, layers))


def _kept_substitutes(made: Skeleton, layers: Sequence[Sequence[StreamableModule]]) -> dict[str, int]:
    """Return the bytes of substitutes of weights that cannot be streamed, such as tied heads, by format."""
    streamable = {module.name for layer in layers for module in layer}
    kept = [
        _packed_bytes(shapes.values())
        for name, shapes in substitutable_weights(made.model, find_adapter(made.model)).items()
        if name not in streamable and _fits(shapes.values())
    ]
    sizes = {name: [each[name] for each in kept] for name in copies()}
    return {name: sum(each) + copies()[name].laying_out * max(each, default=0) for name, each in sizes.items()}


def _largest(layers: Sequence[Sequence[StreamableModule]]) -> int:
    weights = [weight for layer in layers for module in layer for weight in module.weights.values()]
    return max((run.whole.nbytes for weight in weights for run in weight.runs()), default=0)


def _fits(shapes: Iterable[torch.Size]) -> bool:
    return all(kind().fits(shape) for shape in shapes for kind in copies().values())


def _packed_bytes(shapes: Iterable[torch.Size]) -> dict[str, int]:
    return {name: sum(kind().nbytes(shape) for shape in shapes) for name, kind in copies().items()}


def _scored_heads(config: PreTrainedConfig) -> int:
    """Count the heads whose scores attention holds at once: all of a layer in eager attention, else none."""
    text = config.get_text_config(decoder=True)
    # Some models have no heads.
    heads: int = getattr(text, "num_attention_heads", 0)
    return heads if text._attn_implementation == "eager" else 0
