"""Weights that a pass reads: most of its cost where memory is the bottleneck."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.model.early_head import DraftHead
from selfspec.model.experts import experts_of, shares_read, widening_by_experts
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.registry import has_encoder
from selfspec.model.substitutes import substituted_weights
from selfspec.model.vocabulary import weight_of


def share_read(
    model: PreTrainedModel,
    adapter: Adapter,
    path: LayerPath,
    head: DraftHead | None = None,
    price: Callable[[Tensor], float] = lambda weight: weight.nbytes,
) -> float:
    """Estimate c as the weights that a step of the path reads, divided by those that a target step reads.

    Embeddings count as nothing, since a step reads single rows of them; the language-model head counts in both. `head`
    reads the path's last states; None: the model's own norm and head. `price` is the cost of reading a weight: by
    default its bytes.
    """
    layers = adapter.decoder_layers(model)
    output = model.get_output_embeddings()
    experts = experts_of(model, adapter)
    of_full, of_path = (_of_one_token(price, shares_read(experts, most)) for most in (None, path.experts))
    rows, full = _sum(price, output.parameters()), _sum(of_full, _read_by_a_step(model, adapter))
    read = full - rows - sum(_sum(of_full, layer.parameters()) for layer in layers)
    read += sum(_layer_price(layer, index, adapter, path, of_path) for index, layer in enumerate(layers))
    kept = 1 if head is None or head.tokens is None else len(head.tokens) / weight_of(output).shape[0]
    read += kept * rows * (_bits_of(path, weight_of(output)) if path.head_substituted else 1)
    if head is not None and head.adapter is not None:
        read += sum(weight.numel() for weight in head.adapter.parameters()) * weight_of(output).element_size()
    return float(read / full)


def bytes_read(model: PreTrainedModel, adapter: Adapter) -> int:
    """Return the bytes of weights that a step of the full network reads, with the head, without embeddings."""
    price = _of_one_token(lambda weight: weight.nbytes, shares_read(experts_of(model, adapter)))
    return round(_sum(price, _read_by_a_step(model, adapter)))


def widening(model: PreTrainedModel, adapter: Adapter) -> float:
    """Return the cost of what a further token of a target pass reads, in steps: tokens may use different experts."""
    return widening_by_experts(experts_of(model, adapter), bytes_read(model, adapter))


def _of_one_token(price: Callable[[Tensor], float], shares: Mapping[int, float]) -> Callable[[Tensor], float]:
    """Return a price for one token: it reads a share of expert weights, or all of them if they are streamed."""

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
    read = _sum(price, layer.parameters())
    for sublayer in sublayers:
        modules = [layer.get_submodule(name) for name in adapter.modules_of(layer, sublayer.part)]
        if not path.runs(sublayer):
            read -= sum(_sum(price, module.parameters()) for module in modules)
        elif path.copy is not None and sublayer in path.substituted:
            weights = [weight for module in modules for weight in substituted_weights(module, path.copy.format)]
            read -= sum(price(weight) * (1 - _bits_of(path, weight)) for weight in weights)
    return read


def _bits_of(path: LayerPath, weight: Tensor) -> float:
    """Return the bits of a substitute's weight divided by those of the weight itself."""
    assert path.copy is not None
    return path.copy.format.bits / (8 * weight.element_size())


def _sum(price: Callable[[Tensor], float], weights: Iterable[Tensor]) -> float:
    return sum(map(price, weights))
