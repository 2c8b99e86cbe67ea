"""Gates around the decoder layers of a stock model, and taps of its states, as views that share every weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Cache

from selfspec.architecture import Adapter
from selfspec.cache.shared_cache import CacheReader
from selfspec.cache.shared_layer import RecurrentLayer
from selfspec.compat import cache_name
from selfspec.errors import UnsupportedModelError
from selfspec.formats.format import Format
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.substitutes import Substitutes, no_substitutes
from selfspec.model.view import call_with, hidden_states, replaced, view_with, view_with_layers, view_with_parts

Point = int | Literal["last", "normed"]
"""Point where states are kept: input of a layer, by number; after the last layer; after the final norm."""

Features = Mapping[Point, Tensor]
"""States of the tokens of a pass, `[rows, tokens, hidden]` each."""


@dataclass(frozen=True)
class ExactStates:
    """Holds the states of a pass at a sublayer, `[batch, tokens, hidden]` each, from which another pass can resume.

    `hidden` is the input of its layer; `attention`, by module name, the attention's output if the sublayer is the MLP.
    """

    hidden: Tensor
    attention: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def concatenated(cls, parts: Sequence[ExactStates]) -> ExactStates:
        """Concatenate the states of consecutive tokens."""
        # Some models keep several streams of hidden states, before the batch.
        attention = {name: torch.cat([part.attention[name] for part in parts], -2) for name in parts[0].attention}
        return cls(torch.cat([part.hidden for part in parts], -2), attention)

    def first(self, tokens: int) -> ExactStates:
        """Return the states of the first tokens."""
        attention = {name: each[..., :tokens, :] for name, each in self.attention.items()}
        return ExactStates(self.hidden[..., :tokens, :], attention)


class Boundary:
    """Holds the states given to a pass at `path.start`, and those that it leaves at `path.resume_point`.

    `left` has the outputs of attentions by name, and the input of the layer under None.
    """

    def __init__(self) -> None:
        self.given: ExactStates | None = None
        self.left: dict[str | None, Tensor] = {}

    def pass_given(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a layer on the given states instead of its input."""
        assert self.given is not None
        return call_with(layer, self.given.hidden, args, kwargs)

    def replay_attention(self, name: str, returns: int, *args: Any, **kwargs: Any) -> Any:
        """Return the attention output of an earlier pass instead of computing it."""
        assert self.given is not None
        return _values(self.given.attention[name], returns)


class GatedModel:
    """Makes a view of a stock model, neither changed nor copied, that runs one path: `module`, called like it."""

    def __init__(
        self, model: nn.Module, adapter: Adapter, path: LayerPath, substitutes: Substitutes | None = None
    ) -> None:
        # The gates refer to the boundary and not to this object, to avoid a reference cycle.
        self._boundary = Boundary()
        layers = _with_lent(adapter.decoder_layers(model), adapter)
        if path.format is not None and path.substituted:
            layers = _substituted(path.format, layers, adapter, model, path, substitutes or Substitutes())
        layers = [_gated_layer(layer, index, adapter, path, self._boundary) for index, layer in enumerate(layers)]
        self.module = view_with_layers(model, adapter.path(model), layers)
        self._tap: FeatureTap | None = None

    def tap(self, adapter: Adapter, base: str, points: tuple[Point, ...]) -> None:
        """Keep states of all later passes; arguments as in `FeatureTap`."""
        if points:
            self._tap = FeatureTap(self.module, adapter, base, points)
            self.module = self._tap.module

    def features(self) -> Features:
        """Take the states of the last pass at the tapped points."""
        return {} if self._tap is None else self._tap.take()

    def enter(self, states: ExactStates | None) -> None:
        """Set the states that enter at `path.start` in the next pass."""
        self._boundary.given = states

    def leave(self) -> ExactStates | None:
        """Take the states of the last pass at `path.resume_point`; None if the path has no such point."""
        self._boundary.given = None
        left = self._boundary.left
        hidden = left.pop(None, None)
        states = None if hidden is None else ExactStates(hidden, {str(name): each for name, each in left.items()})
        left.clear()
        return states


class FeatureTap:
    """Makes a view of a model, `module`, that keeps states at `points`; `base` is the path to all but its head.

    UnsupportedModelError: states after the final norm are wanted, and no part of the model returns them.
    """

    def __init__(self, model: nn.Module, adapter: Adapter, base: str, points: Sequence[Point]) -> None:
        # The views refer to the dict and not to this object, to avoid a reference cycle.
        self._kept: dict[Point, Tensor] = {}
        layers: list[nn.Module] = adapter.decoder_layers(model)
        for point in points:
            if isinstance(point, int):
                layers[point] = replaced(layers[point], partial(input_kept, self._kept, point, layers[point]))
        if "last" in points:
            layers[-1] = replaced(layers[-1], partial(output_kept, self._kept, "last", layers[-1]))
        self.module = view_with_layers(model, adapter.path(model), layers)
        if "normed" in points:
            if not base:
                raise UnsupportedModelError(
                    f"this draft reads states after the final norm, and {type(model).__name__} has its layers beside "
                    "the head: put all but the head in a module of their own, or draft with other states"
                )
            whole = self.module.get_submodule(base)
            kept = replaced(whole, partial(output_kept, self._kept, "normed", whole))
            self.module = view_with_parts(self.module, {base: kept})

    def take(self) -> Features:
        """Return the states of the last pass, and drop them here."""
        taken = dict(self._kept)
        self._kept.clear()
        return taken


def input_kept(kept: dict[Any, Tensor], point: Any, module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module, and keep its hidden states under `point`."""
    kept[point] = hidden_states(args, kwargs)
    return module(*args, **kwargs)


def output_kept(kept: dict[Any, Tensor], point: Any, module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module, and keep the states that it returns under `point`."""
    output = module(*args, **kwargs)
    # A layer returns a tensor or a tuple, a model an output whose first field are its states.
    kept[point] = output if isinstance(output, Tensor) else output[0]
    return output


def _with_lent(layers: Sequence[nn.Module], adapter: Adapter) -> Sequence[nn.Module]:
    """Return the layers, each with the parts that the first layer's attention lends."""
    if not adapter.lends:
        return layers
    name = adapter.modules(Part.ATTENTION)[0]
    lender = layers[0].get_submodule(name)
    parts = {lent: part for lent, part in lender.named_children() if lent in adapter.lends}
    values = {lent: getattr(lender, lent) for lent in adapter.lends if lent not in parts}
    lent_to = [layers[0]]
    for layer in layers[1:]:
        attention = view_with(layer.get_submodule(name), parts)
        attention.__dict__.update(values)
        lent_to.append(view_with_parts(layer, {name: attention}))
    return lent_to


def _substituted(
    format: Format,
    layers: Sequence[nn.Module],
    adapter: Adapter,
    model: nn.Module,
    path: LayerPath,
    substitutes: Substitutes,
) -> list[nn.Module]:
    """Return the layers, with substitutes in the sublayers that the path runs in fewer bits."""
    changed = list(layers)
    prefix = ".".join(adapter.path(model))
    runs = [
        (each.layer, name, f"{prefix}.{each.layer}.{name}")
        for each in sorted(path.substituted)
        for name in adapter.modules_of(layers[each.layer], each.part)
    ]
    unchanged = substitutes.unchanged(((layers[index].get_submodule(name), of) for index, name, of in runs), format)
    for index, name, of in runs:
        module = changed[index].get_submodule(name)
        other = substitutes.within(module, of, format, unchanged)
        if other is not module:
            changed[index] = view_with_parts(changed[index], {name: other})
    if all(after is before for after, before in zip(changed, layers, strict=True)):
        raise no_substitutes(model, format)
    return changed


def _gated_layer(layer: nn.Module, index: int, adapter: Adapter, path: LayerPath, boundary: Boundary) -> nn.Module:
    if not any(path.runs(Sublayer(index, part)) for part in Part):
        pass_through = partial(_without, "input", adapter.layer_returns)
        publishing = _publishing_layer(layer, index, adapter, path)
        if publishing is not None:
            pass_through = partial(_after, publishing, pass_through)
        gated = replaced(layer, pass_through)
    else:
        gated = _gated_sublayers(layer, index, adapter, path, boundary)
    if path.start is not None and path.start.layer == index:
        gated = replaced(layer, partial(boundary.pass_given, gated))
    if path.resume_point is not None and path.resume_point.layer == index:
        gated = replaced(layer, partial(input_kept, boundary.left, None, gated))
    return gated


def _gated_sublayers(layer: nn.Module, index: int, adapter: Adapter, path: LayerPath, boundary: Boundary) -> nn.Module:
    attention, mlp = Sublayer(index, Part.ATTENTION), Sublayer(index, Part.MLP)
    forwards: dict[str, Callable[..., Any]] = {}
    for name in adapter.modules_of(layer, Part.ATTENTION):
        module, returns = layer.get_submodule(name), adapter.returns(name)
        if not path.runs(attention):
            instead = (
                partial(boundary.replay_attention, name, returns)
                if path.start == mlp
                else partial(_without, adapter.without_attention, returns)
            )
            if _is_read_later(module, index, adapter, path):
                instead = partial(_after, _publishing(module, attention, path), instead)
            forwards[name] = instead
            continue
        if name in adapter.recurrent:
            forwards[name] = partial(token_by_token, module, index)
        if path.resume_point == mlp:
            forwards[name] = partial(output_kept, boundary.left, name, forwards.get(name, module))
    if mlp in path.skipped:
        for name in adapter.modules_of(layer, Part.MLP):
            forwards[name] = partial(_without, adapter.without_mlp, adapter.mlp_returns)
    if not forwards:
        return layer
    parts = {name: replaced(layer.get_submodule(name), forward) for name, forward in forwards.items()}
    return view_with_parts(layer, parts)


def token_by_token(module: nn.Module, index: int, *args: Any, **kwargs: Any) -> Any:
    """Run a recurrent module token by token and keep the layer's state after each; rows have no padding to mask."""
    cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
    states = None if cache is None else cache.layers[index]
    # Modules of different kinds may have the same name.
    if not isinstance(states, RecurrentLayer):
        return module(*args, **kwargs)
    unmasked = {name: None if name == "attention_mask" else value for name, value in kwargs.items()}
    tokens = hidden_states(args, kwargs).split(1, 1)
    outputs = []
    for node, token in zip(states.nodes(len(tokens)), tokens, strict=True):
        states.enter(node)
        outputs.append(call_with(module, token, args, unmasked))
        states.record(node)
    return torch.cat(outputs, 1)


def _without(gives: str, returns: int, *args: Any, **kwargs: Any) -> Any:
    """Stand in for a module that is left out."""
    hidden = args[-1] if gives == "residual" else hidden_states(args, kwargs)
    return _values(torch.zeros_like(hidden) if gives == "zeros" else hidden, returns)


def _is_read_later(attention: nn.Module, index: int, adapter: Adapter, path: LayerPath) -> bool:
    """Return whether later layers of the path read keys and values that this attention publishes."""
    publishes = adapter.publishes is not None and bool(getattr(attention, adapter.publishes, False))
    return publishes and any(path.runs(Sublayer(later, Part.ATTENTION)) for later in range(index + 1, path.depth))


def _publishing(module: nn.Module, attention: Sublayer, path: LayerPath) -> Callable[..., Any]:
    """Return an attention that, up to `path.start`, publishes what an earlier pass left in the cache."""
    if path.start is None or attention > path.start:
        return module
    return partial(_reading, module)


def _publishing_layer(layer: nn.Module, index: int, adapter: Adapter, path: LayerPath) -> nn.Module | None:
    """Return the layer with its attentions publishing, if later layers read what they publish; else None."""
    modules = [(name, layer.get_submodule(name)) for name in adapter.modules_of(layer, Part.ATTENTION)]
    publishing = {
        name: replaced(module, _publishing(module, Sublayer(index, Part.ATTENTION), path))
        for name, module in modules
        if _is_read_later(module, index, adapter, path)
    }
    return view_with_parts(layer, publishing) if publishing else None


def _reading(attention: nn.Module, *args: Any, **kwargs: Any) -> Any:
    name = cache_name(kwargs)
    assert name is not None
    return attention(*args, **{**kwargs, name: CacheReader(kwargs[name])})


def _after(first: Callable[..., Any], then: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    first(*args, **kwargs)
    return then(*args, **kwargs)


def _values(hidden: Tensor | None, returns: int) -> Any:
    return hidden if returns == 1 else (hidden, *[None] * (returns - 1))
