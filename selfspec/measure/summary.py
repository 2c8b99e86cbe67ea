"""Summaries of models: parameters and bytes by part, the KV cache, and costs of drafts in fewer bits and from exits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.shared_cache import recurrent_layers
from selfspec.formats.format import Format, copies
from selfspec.model.identity import weight_of
from selfspec.model.layer_path import Part
from selfspec.model.registry import find_adapter, without_weights
from selfspec.model.sizes import LayerCache, context_of, encoders, layer_caches, weights_outside, windows_of
from selfspec.model.substitutes import substitutable_weights


@dataclass(frozen=True)
class Weights:
    """Counts some weights, and their bytes, which a step that uses them all reads."""

    parameters: int
    bytes: int

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Weights:
        """Count some tensors, each of them once."""
        distinct = {id(tensor): tensor for tensor in tensors}.values()
        return cls(sum(tensor.numel() for tensor in distinct), sum(tensor.nbytes for tensor in distinct))

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.parameters + other.parameters, self.bytes + other.bytes)


@dataclass(frozen=True)
class SublayerSummary:
    """Describes an attention or an MLP: its attribute, the class of the module, and its weights."""

    attribute: str
    module: str
    weights: Weights


@dataclass(frozen=True)
class LayerSummary:
    """Describes a decoder layer: `norms` are its other weights; `window` is in tokens, None: attention sees all."""

    attention: SublayerSummary
    mlp: SublayerSummary
    norms: Weights
    window: int | None

    @property
    def weights(self) -> Weights:
        """Weights of the whole layer."""
        return self.attention.weights + self.mlp.weights + self.norms


@dataclass(frozen=True)
class CacheSummary:
    """Describes keys and values. Sliding-window layers keep theirs in full, so that cursors can roll back.

    Attributes:
        heads: key and value heads of the first layer that has any; the next two are numbers in a head.
        bytes_per_token: keys and values of one token over all layers.
        recurrent_layers: number of layers with a state, whose size does not depend on the number of tokens.
    """

    heads: int
    head_dim: int
    value_dim: int
    bytes_per_token: int
    sliding_layers: int
    recurrent_layers: int


@dataclass(frozen=True)
class SubstitutesSummary:
    """Describes drafting in a format: bits of a weight, bytes of all substitutes, and their share of all bytes."""

    format: str
    bits: int
    bytes: int
    share: float


@dataclass(frozen=True)
class ExitSummary:
    """Describes drafting from exit layer E: bytes of weights that a draft step reads, and the predicted ratio c."""

    layer: int
    bytes_read: int
    cost_ratio: float


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """Describes a model by its parts.

    Attributes:
        context: the most positions it was made for; None: unlimited.
        embedding: token and position embeddings; a step looks up single rows of them, which counts as no reading.
        encoder: reads the input before the first step; 0 parameters if there is none.
        final_norm: everything else between the layers and the head.
        tied: True if the head has the weights of the embedding; `total` counts them once.
        target_bytes_read: bytes that a step of plain decoding reads.
        exits: for each exit, the bytes that a draft step reads, and its cost ratio c.
    """

    model: str
    model_type: str
    dtype: str
    width: int
    vocabulary: int
    context: int | None
    embedding: Weights
    layers: tuple[LayerSummary, ...]
    encoder: Weights
    final_norm: Weights
    head: Weights
    tied: bool
    total: Weights
    cache: CacheSummary
    substitutes: tuple[SubstitutesSummary, ...]
    target_bytes_read: int
    exits: tuple[ExitSummary, ...]


def describe(model: PreTrainedModel, adapter: Adapter | None = None) -> ModelSummary:
    """Describe a model without running it. Its weights may be on the meta device."""
    adapter = adapter or find_adapter(model)
    config = model.config.get_text_config(decoder=True)
    modules = adapter.decoder_layers(model)
    windows = windows_of(config, len(modules))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    total = Weights.of(model.parameters())
    layers = tuple(_layer(module, adapter, window) for module, window in zip(modules, windows, strict=True))
    encoder = encoders(model)
    final_norm = Weights.of(weights_outside(model, [*embeddings, *modules, *encoder, head]))
    # The encoder's embeddings are counted with all embeddings.
    read_before = {id(weight) for part in encoder for weight in weights_outside(part, embeddings)}
    # Bytes that a step reads, by number of layers: from head and final norm alone to all layers.
    ends = Weights.of(head.parameters()).bytes + final_norm.bytes
    reads = list(accumulate((layer.weights.bytes for layer in layers), initial=ends))
    return ModelSummary(
        model=type(model).__name__,
        model_type=config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        width=config.hidden_size,
        vocabulary=weight_of(embedding).shape[0],
        context=context_of(config),
        embedding=Weights.of(weight for module in embeddings for weight in module.parameters()),
        layers=layers,
        encoder=Weights.of(weight for weight in model.parameters() if id(weight) in read_before),
        final_norm=final_norm,
        head=Weights.of(head.parameters()),
        tied=weight_of(head) is weight_of(embedding),
        total=total,
        cache=cache_summary(config, model.dtype, len(modules)),
        substitutes=tuple(_substitutes(model, adapter, kind(), total) for kind in copies().values()),
        target_bytes_read=reads[-1],
        exits=tuple(ExitSummary(layer, reads[layer], reads[layer] / reads[-1]) for layer in range(1, len(layers))),
    )


def _substitutes(model: PreTrainedModel, adapter: Adapter, format: Format, total: Weights) -> SubstitutesSummary:
    shapes = [shape for module in substitutable_weights(model, adapter).values() for shape in module.values()]
    taken = sum(format.nbytes(shape) for shape in shapes if format.fits(shape))
    return SubstitutesSummary(format.name, format.bits, taken, taken / total.bytes)


def describe_config(config: PreTrainedConfig) -> ModelSummary:
    """Describe a model from its configuration alone: no weights are loaded."""
    return describe(without_weights(config))


def _layer(layer: nn.Module, adapter: Adapter, window: int | None) -> LayerSummary:
    attentions, mlps = (adapter.modules_of(layer, part) for part in Part)
    return LayerSummary(
        attention=_sublayer(layer, attentions),
        mlp=_sublayer(layer, mlps),
        norms=Weights.of(weights_outside(layer, [layer.get_submodule(name) for name in (*attentions, *mlps)])),
        window=window,
    )


def _sublayer(layer: nn.Module, names: Sequence[str]) -> SublayerSummary:
    parts = [layer.get_submodule(name) for name in names]
    return SublayerSummary(
        ", ".join(names),
        ", ".join(dict.fromkeys(type(part).__name__ for part in parts)),
        Weights.of(weight for part in parts for weight in part.parameters()),
    )


def cache_summary(config: PreTrainedConfig, dtype: torch.dtype, depth: int | None = None) -> CacheSummary:
    """Describe the keys and values of `depth` layers, kept in a dtype; None: of all layers of the configuration."""
    windows, caches = windows_of(config, depth or config.num_hidden_layers), layer_caches(config, depth)
    first = next((each for each in caches if each.heads), LayerCache(0, 0, 0, None))
    return CacheSummary(
        heads=first.heads,
        head_dim=first.key,
        value_dim=first.value,
        bytes_per_token=dtype.itemsize * sum(each.numbers for each in caches),
        sliding_layers=sum(window is not None for window in windows),
        recurrent_layers=len(recurrent_layers(config)),
    )
