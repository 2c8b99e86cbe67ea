"""Features: states of a model at given points, kept from passes that run anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from selfspec.architecture import Adapter
from selfspec.model.view import hidden_states, replaced, view_with_layers, view_with_parts

Point = int | Literal["last", "normed"]
"""Point where states are kept: input of a layer, by number; after the last layer; after the final norm."""

Features = Mapping[Point, Tensor]
"""States of the tokens of a pass, `[rows, tokens, hidden]` each."""


class FeatureTap:
    """Makes a view of a model, `module`, that keeps states at `points`; `base` is the path to all but its head."""

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
