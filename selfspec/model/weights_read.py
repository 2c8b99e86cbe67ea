"""The weights that a pass reads, by what it runs: most of what it costs where memory is the bottleneck."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.model.adapter import Adapter
from selfspec.model.early_head import DraftHead
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.substitutes import substituted_weights


def share_read(model: PreTrainedModel, adapter: Adapter, path: LayerPath, head: DraftHead | None = None) -> float:
    """The draft cost ratio c by the weights that a step reads: those of the path by those of the full network.

    Embeddings count as nothing, since a step reads single rows of them; the language-model head counts in both.

    Args:
        model: the stock model.
        adapter: where its layers are.
        path: what a draft step runs.
        head: what reads its last states; None: the model's own norm and head.
    """
    layers = adapter.decoder_layers(model)
    output = model.get_output_embeddings()
    rows, full = _bytes(output.parameters()), bytes_read(model, adapter)
    read = full - rows - sum(_bytes(layer.parameters()) for layer in layers)
    read += sum(_layer_bytes(layer, index, adapter, path) for index, layer in enumerate(layers))
    if head is None or head.tokens is None:
        read += int(rows * _bits_of(path, output.weight)) if path.head_substituted else rows
    else:
        read += rows * len(head.tokens) // output.weight.shape[0]
    if head is not None and head.adapter is not None:
        read += sum(weight.numel() for weight in head.adapter.parameters()) * output.weight.element_size()
    return float(read / full)


def bytes_read(model: PreTrainedModel, adapter: Adapter) -> int:
    """Bytes of the weights that a step of the full network reads, head included and embeddings not."""
    layers, output = adapter.decoder_layers(model), model.get_output_embeddings()
    looked_up = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    rest = weights_outside(model, [*layers, *looked_up, output])
    return _bytes([*rest, *output.parameters()]) + sum(_bytes(layer.parameters()) for layer in layers)


def weights_outside(model: nn.Module, modules: Sequence[nn.Module]) -> list[Tensor]:
    """The weights of a model, or of a part of one, that none of some modules in it holds."""
    held = {id(weight) for module in modules for weight in module.parameters()}
    return [weight for weight in model.parameters() if id(weight) not in held]


def _layer_bytes(layer: nn.Module, index: int, adapter: Adapter, path: LayerPath) -> int:
    sublayers = [Sublayer(index, part) for part in Part]
    if not any(map(path.runs, sublayers)):
        return 0
    read = _bytes(layer.parameters())
    for sublayer in sublayers:
        modules = [layer.get_submodule(name) for name in adapter.modules_of(layer, sublayer.part)]
        if not path.runs(sublayer):
            read -= sum(_bytes(module.parameters()) for module in modules)
        elif path.precision is not None and sublayer in path.substituted:
            weights = [weight for module in modules for weight in substituted_weights(module, path.precision)]
            read -= sum(int(weight.nbytes * (1 - _bits_of(path, weight))) for weight in weights)
    return read


def _bits_of(path: LayerPath, weight: Tensor) -> float:
    """The bits of a substitute's weight by those of the weight itself."""
    assert path.precision is not None
    return path.precision.bits / (8 * weight.element_size())


def _bytes(weights: Iterable[Tensor]) -> int:
    return sum(weight.nbytes for weight in weights)
