"""Sizes of models: their context, their keys and values, and the bytes that passes read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from selfspec.architecture import Adapter
from selfspec.cache.shared_cache import recurrent_layers
from selfspec.model.early_head import DraftHead
from selfspec.model.identity import weight_of
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.registry import has_encoder
from selfspec.model.substitutes import substituted_weights


def context_of(config: PreTrainedConfig) -> int | None:
    """Return the most tokens that a network of this configuration reads; None: any number."""
    most: int | None = getattr(config, "max_target_positions", getattr(config, "max_position_embeddings", None))
    return most


def windows_of(config: PreTrainedConfig, depth: int) -> list[int | None]:
    """Return the window of each layer in tokens; None: its attention sees all."""
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return [window] * depth
    return [window if layer_type == "sliding_attention" else None for layer_type in layer_types[:depth]]


@dataclass(frozen=True)
class LayerCache:
    """Describes a layer's keys and values: heads (0: it keeps none), numbers in a head, and the window in tokens."""

    heads: int
    key: int
    value: int
    window: int | None

    @property
    def numbers(self) -> int:
        """Numbers kept for one token."""
        return self.heads * (self.key + self.value)


def layer_caches(config: PreTrainedConfig, depth: int | None = None) -> list[LayerCache]:
    """Describe the keys and values of each of `depth` layers; None: of all layers of the configuration."""
    windows = windows_of(config, depth or config.num_hidden_layers)
    # The last layers may read keys and values of earlier layers, and keep none themselves.
    keeping = len(windows) - (getattr(config, "num_kv_shared_layers", None) or 0)
    recurrent = recurrent_layers(config)
    stateful = [layer for layer, stock in recurrent.items() if not isinstance(stock, CacheLayerMixin)]
    each = getattr(config, "per_layer_config", None)
    return [
        LayerCache(0, 0, 0, None)
        if layer >= keeping or layer in stateful
        else _layer_cache(each[layer] if each else config, window)
        for layer, window in enumerate(windows)
    ]


def _layer_cache(config: PreTrainedConfig, window: int | None) -> LayerCache:
    queries: int = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        # Latent attention keeps the latent vector and the rotated part of the key.
        return LayerCache(1, config.kv_lora_rank, config.qk_rope_head_dim, window)
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // queries
    shared = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    heads: int = 1 if shared else getattr(config, "num_key_value_heads", None) or queries
    return LayerCache(heads, head_dim, getattr(config, "v_head_dim", None) or head_dim, window)


def cache_bytes_of_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Count the bytes of one token's keys and values over all layers, kept in a dtype."""
    return dtype.itemsize * sum(each.numbers for each in layer_caches(config))


def cache_bytes_read(config: PreTrainedConfig, dtype: torch.dtype, path: LayerPath, lengths: Sequence[int]) -> float:
    """Count the bytes of keys and values that a pass over one token per row reads."""
    read = 0.0
    window = path.window
    of_view = None if window is None else window.recent + window.sinks
    for layer, cache in enumerate(layer_caches(config)):
        if not path.runs(Sublayer(layer, Part.ATTENTION)):
            continue
        seen = [most for most in (cache.window, of_view) if most is not None]
        read += cache.numbers * dtype.itemsize * sum(min(length, *seen) if seen else length for length in lengths)
    return read


def share_read(
    model: PreTrainedModel,
    adapter: Adapter,
    path: LayerPath,
    head: DraftHead | None = None,
    price: Callable[[Tensor], float] = lambda weight: weight.nbytes,
) -> float:
    """Estimate c: the price of the weights that a step of the path reads, divided by that of a target step.

    Embeddings count as nothing: a step reads single rows. `price` is the cost of reading a weight, by default in bytes.
    """
    layers = adapter.decoder_layers(model)
    output = model.get_output_embeddings()
    of_token = _of_one_token(price, experts_of(model, adapter))
    rows, full = sum(map(price, output.parameters())), sum(map(of_token, _read_by_a_step(model, adapter)))
    read = full - rows - sum(of_token(weight) for layer in layers for weight in layer.parameters())
    read += sum(_layer_price(layer, index, adapter, path, of_token) for index, layer in enumerate(layers))
    kept = 1 if head is None or head.tokens is None else len(head.tokens) / weight_of(output).shape[0]
    read += kept * rows * (_bits_of(path, weight_of(output)) if path.head_substituted else 1)
    if head is not None and head.adapter is not None:
        read += sum(weight.numel() for weight in head.adapter.parameters()) * weight_of(output).element_size()
    return float(read / full)


def bytes_read(model: PreTrainedModel, adapter: Adapter) -> int:
    """Return the bytes of weights that a step of the full network reads, with the head, without embeddings."""
    price = _of_one_token(lambda weight: weight.nbytes, experts_of(model, adapter))
    return round(sum(map(price, _read_by_a_step(model, adapter))))


def widening(model: PreTrainedModel, adapter: Adapter) -> float:
    """Return the cost of what a further token of a target pass reads, in steps: tokens may use different experts."""
    experts = experts_of(model, adapter)
    more = sum((each.share(_TOKENS) - each.share()) * weight.nbytes for each in experts for weight in each.weights)
    return more / (_TOKENS - 1) / bytes_read(model, adapter)


# Tokens of a pass over which the cost of a further token is averaged.
_TOKENS = 5


@dataclass(frozen=True)
class Experts:
    """Holds the routed experts of an MLP: their weights, `[experts, ...]` each, and how many a token is sent to."""

    weights: tuple[Tensor, ...]
    active: int

    @property
    def number(self) -> int:
        """Number of experts."""
        return int(self.weights[0].shape[0])

    def share(self, tokens: int = 1) -> float:
        """Return the share of experts read by `tokens` tokens that choose independently."""
        return 1 - (1 - min(self.active, self.number) / self.number) ** tokens


def experts_of(model: nn.Module, adapter: Adapter) -> list[Experts]:
    """Return the routed experts of all decoder layers: weights of three dimensions beside a router with `top_k`."""
    found = []
    for layer in adapter.decoder_layers(model):
        for mlp in map(layer.get_submodule, adapter.modules_of(layer, Part.MLP)):
            routers = (vars(module).get("top_k") for module in mlp.modules())
            active = max((top_k for top_k in routers if type(top_k) is int), default=0)
            weights = tuple(weight for weight in mlp.parameters() if weight.ndim == 3)
            if active and weights:
                found.append(Experts(weights, active))
    return found


def _of_one_token(price: Callable[[Tensor], float], experts: Sequence[Experts]) -> Callable[[Tensor], float]:
    """Return a price for one token: it reads a share of expert weights, or all of them if they are streamed."""
    shares = {each.number: each.share() for each in experts}

    def priced(weight: Tensor) -> float:
        is_read_whole = weight.ndim != 3 or weight.is_meta
        return price(weight) if is_read_whole else price(weight) * shares.get(weight.shape[0], 1.0)

    return priced


def weights_outside(model: nn.Module, modules: Sequence[nn.Module]) -> list[Tensor]:
    """Return the weights of a model, or of a part of one, that are in none of `modules`."""
    held = {id(weight) for module in modules for weight in module.parameters()}
    return [weight for weight in model.parameters() if id(weight) not in held]


def encoders(model: PreTrainedModel) -> list[nn.Module]:
    """Return the encoder of a model, which no step runs; empty if it has none."""
    return [model.get_encoder()] if has_encoder(model) else []


def _read_by_a_step(model: PreTrainedModel, adapter: Adapter) -> Iterable[Tensor]:
    layers, output = adapter.decoder_layers(model), model.get_output_embeddings()
    looked_up = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    yield from weights_outside(model, [*layers, *looked_up, *encoders(model), output])
    yield from output.parameters()
    for layer in layers:
        yield from layer.parameters()


def _layer_price(
    layer: nn.Module, index: int, adapter: Adapter, path: LayerPath, price: Callable[[Tensor], float]
) -> float:
    sublayers = [Sublayer(index, part) for part in Part]
    if not any(map(path.runs, sublayers)):
        return 0
    read = sum(map(price, layer.parameters()))
    for sublayer in sublayers:
        modules = [layer.get_submodule(name) for name in adapter.modules_of(layer, sublayer.part)]
        if not path.runs(sublayer):
            read -= sum(price(weight) for module in modules for weight in module.parameters())
        elif path.format is not None and sublayer in path.substituted:
            weights = [weight for module in modules for weight in substituted_weights(module, path.format)]
            read -= sum(price(weight) * (1 - _bits_of(path, weight)) for weight in weights)
    return read


def _bits_of(path: LayerPath, weight: Tensor) -> float:
    """Return the bits of a substitute's weight divided by those of the weight itself."""
    assert path.format is not None
    return path.format.bits * weight.numel() / (8 * weight.nbytes)
