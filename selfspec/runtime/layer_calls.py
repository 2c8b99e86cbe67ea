"""Decoder layers as functions of tensors, weights included, so that a program holds equal layers only once.

Otherwise the program of a pass would repeat the same kernels for each of dozens of layers that differ in nothing but
their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from selfspec.architecture import Adapter
from selfspec.model.gated_view import GatedModel
from selfspec.model.substitutes import Substitute
from selfspec.model.view import has_other_forward, view_running, view_with, view_with_layers
from selfspec.runtime.held_weights import HeldWeights
from selfspec.runtime.recordable import frozen_view
from selfspec.runtime.slot_cache import SlotCache

_TENSOR = "a tensor"
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
# Weights are arguments, children are compared by name, and what a layer does with its index shows when the first and
# the last of equal layers are recorded.
_NOT_COMPARED = ("_parameters", "_buffers", "_modules", "layer_idx")


@dataclass(frozen=True)
class _CacheOf:
    """A placeholder for a cache: the number of tensors that a layer needs of it."""

    tensors: int
    padded: bool


@dataclass(frozen=True)
class _Form:
    """What is equal in all calls of equal layers: everything but tensors.

    Attributes:
        tree: of arguments or results.
        leaves: in its order; tensors and caches are placeholders.
    """

    tree: TreeSpec
    leaves: tuple[object, ...]

    def filled(self, tensors: Sequence[Tensor], index: int) -> Any:
        """Rebuild arguments or results.

        Args:
            tensors: one for each tensor among the leaves.
            index: the layer for which a cache among them is used.
        """
        rest = iter(tensors)
        leaves: list[object] = []
        for leaf in self.leaves:
            if leaf is _TENSOR:
                leaves.append(next(rest))
            elif isinstance(leaf, _CacheOf):
                leaves.append(SlotCache.of_layer(index, [next(rest) for _ in range(leaf.tensors)], leaf.padded))
            else:
                leaves.append(leaf)
        return tree_unflatten(leaves, self.tree)


@dataclass(frozen=True)
class _Given:
    """Arguments or results of one call: the fixed part and the tensors."""

    form: _Form
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, things: Any, index: int) -> _Given:
        leaves, tree = tree_flatten(things)
        tensors: list[Tensor] = []
        kept: list[object] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                kept.append(_TENSOR)
                tensors.append(leaf)
            elif isinstance(leaf, SlotCache):
                needed = leaf.tensors_of_layer(index)
                kept.append(_CacheOf(len(needed), leaf.padded))
                tensors += needed
            else:
                kept.append(leaf)
        return cls(_Form(tree, tuple(kept)), tuple(tensors))


class LayerCall:
    """Replaces the `forward` of one layer of a view.

    Until a function is given it runs the layer and keeps the arguments of its last call.

    Args:
        layer: holds weights that nothing else reads while the layer is recorded.
        index: of the layer.

    Attributes:
        function: computes what the layer does from `example`'s tensors; None: the layer itself runs.
    """

    def __init__(self, layer: nn.Module, index: int) -> None:
        self.index = index
        self.function: Callable[..., Any] | None = None
        self.layer = layer
        self._weights = HeldWeights.of(layer.modules())
        self._arguments: _Given | None = None
        self._results: _Form | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = _Given.of((args, kwargs), self.index)
        known = self._arguments is not None and given.form == self._arguments.form
        if self.function is not None and self._results is not None and known:
            results = self.function(*given.tensors, *self._weights.tensors)
            return self._results.filled(results, self.index)
        output = self.layer(*args, **kwargs)
        self._arguments, self._results = given, _Given.of(output, self.index).form
        return output

    @property
    def example(self) -> tuple[Tensor, ...]:
        """The arguments of the layer's last call, and its weights."""
        assert self._arguments is not None
        return (*self._arguments.tensors, *self._weights.tensors)

    def run(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The layer as a function of the tensors of `example`."""
        assert self._arguments is not None
        count = len(self._arguments.tensors)
        args, kwargs = self._arguments.form.filled(tensors[:count], self.index)
        with self._weights.replaced(tensors[count:]):
            return _Given.of(self.layer(*args, **kwargs), self.index).tensors

    @property
    def likeness(self) -> object:
        """A key, equal for layers that seem to differ in weights alone; None where no function can replace it."""
        if self._arguments is None or self._results is None:
            return None
        if any(leaf is not _TENSOR and leaf is not None for leaf in self._results.leaves):
            return None
        shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in self.example)
        structure = tuple((name, _likeness(module)) for name, module in self.layer.named_modules())
        return (self._arguments.form.tree, tuple(map(repr, self._arguments.form.leaves)), shapes, structure)


def put_calls(view: GatedModel, model: nn.Module, adapter: Adapter) -> tuple[LayerCall, ...]:
    """Replace the layers of a view that it runs whole, substitutes or not, by calls: see `Runtime.put_calls`."""
    layers = adapter.decoder_layers(view.module)
    whole = (
        _with_weights_of_its_own(layer, own) for layer, own in zip(layers, adapter.decoder_layers(model), strict=True)
    )
    calls = tuple(
        LayerCall(layer, index)
        for index, layer in enumerate(whole)
        if layer is not None and not has_other_forward(layer)
    )
    for call in calls:
        layers[call.index] = view_running(layers[call.index], call)
    view.module = view_with_layers(view.module, adapter.path(view.module), layers)
    return calls


def _with_weights_of_its_own(module: nn.Module, own: nn.Module) -> nn.Module | None:
    """A part of a view, with holders for the weights of its substitutes that nothing else reads.

    None where it differs from the model's own part in more than substitutes.
    """
    if module is own:
        return module
    if isinstance(module, Substitute):
        return frozen_view(module)
    if type(module) is not type(own) or has_other_forward(module):
        return None
    others = {name: child for name, child in module._modules.items() if child is not own._modules.get(name)}
    held = {
        name: None if child is None else _with_weights_of_its_own(child, own.get_submodule(name))
        for name, child in others.items()
    }
    children = {name: child for name, child in held.items() if child is not None}
    return view_with(module, children) if len(children) == len(held) else None


def alike(calls: Sequence[LayerCall]) -> list[list[LayerCall]]:
    """Group calls of layers that seem to differ in weights alone, two or more in a group."""
    groups: dict[object, list[LayerCall]] = {}
    for call in calls:
        groups.setdefault(call.likeness, []).append(call)
    return [group for likeness, group in groups.items() if likeness is not None and len(group) > 1]


def _likeness(value: Any) -> object:
    """The comparable part of an attribute."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(map(_likeness, value)))
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(map(_likeness, value)))
    if isinstance(value, dict):
        return (type(value), tuple((name, _likeness(each)) for name, each in value.items()))
    if isinstance(value, partial):
        return (id(value.func), _likeness(value.args), _likeness(value.keywords))
    if isinstance(value, nn.Module):
        others = {name: each for name, each in vars(value).copy().items() if name not in _NOT_COMPARED}
        return (type(value), _likeness(others))
    return id(value)
