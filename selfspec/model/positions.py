"""Positions of tokens: tables that change with the length of a text, and models that count by that of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from selfspec.architecture import Adapter
from selfspec.compat import CACHE_LENGTH_NAMES
from selfspec.errors import UnsupportedOptionError
from selfspec.model.view import replaced, view_with_parts


class RowPositions:
    """Makes a view of a model, `module`, whose passes take each row at its own place in the text."""

    def __init__(self, model: nn.Module, adapter: Adapter) -> None:
        assert adapter.positions is not None
        path = ".".join([*adapter.path(model)[:-1], adapter.positions])
        stock = model.get_submodule(path)
        # The view refers to the list and not to this object, to avoid a reference cycle.
        self._positions: list[Tensor] = []
        named = signature(type(stock).forward).parameters
        embed = _by_ids if isinstance(stock, nn.Embedding) and "position_ids" in named else _by_length
        self.module = view_with_parts(model, {path: replaced(stock, partial(embed, stock, self._positions))})

    def place(self, positions: Tensor) -> None:
        """Set the positions of the next pass, as from `Cursors.positions`, `[rows or 1, width]`."""
        self._positions[:] = [positions]


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    form = signature(type(module).forward)
    return {name: value for name, value in form.bind(module, *args, **kwargs).arguments.items() if name != "self"}


def _by_ids(module: nn.Module, places: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Embed the positions of a pass, `[rows or 1, width, hidden]`."""
    positions = places[0]
    embedded: Tensor = module(**{**_given(module, args, kwargs), "position_ids": positions.flatten()})
    return embedded.reshape(*positions.shape, -1)


def _by_length(module: nn.Module, places: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Embed the positions of a pass, `[rows, width, hidden]`, by a module that counts on from the cache."""
    given = _given(module, args, kwargs)
    length = next(name for name in CACHE_LENGTH_NAMES if name in signature(type(module).forward).parameters)
    given.pop("position_ids", None)
    # Some modules take only the shape of the tokens.
    tokens = {name: value for name, value in given.items() if isinstance(value, Tensor | tuple)}
    rows = next(len(value) if isinstance(value, Tensor) else value[0] for value in tokens.values())
    lines = places[0].expand(rows, -1).tolist()
    # Rows at one place are embedded together.
    groups = [[row for row in range(rows) if tuple(lines[row]) == line] for line in dict.fromkeys(map(tuple, lines))]

    def of_token(group: list[int], column: int, place: int) -> Tensor:
        alone = {
            name: value[group, column, None] if isinstance(value, Tensor) else torch.Size((len(group), 1))
            for name, value in tokens.items()
        }
        made: Tensor = module(**{**given, **alone, length: place})
        return made.expand(len(group), 1, -1)

    embedded = [[of_token(group, *at) for at in enumerate(lines[group[0]])] for group in groups]
    joined = torch.cat([torch.cat(columns, 1) for columns in embedded])
    return joined[torch.tensor([row for group in groups for row in group]).argsort()]


def boundaries(config: PreTrainedConfig) -> list[int]:
    """List the text lengths beyond which passes use other rotary tables; here and below `config` is the text part's."""
    # Tables of type `dynamic` change, too, but only beyond the model's context, where no request goes.
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    # Of the whole model, or of each layer type.
    tables = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    longrope = [table for table in tables if table.get("rope_type") == "longrope"]
    return sorted({table["original_max_position_embeddings"] for table in longrope})


def check_rotary(
    config: PreTrainedConfig, prompts: Sequence[int], max_new_tokens: int, known: int = 0, width: int | None = None
) -> None:
    """Refuse a request in which a pass would use other rotary tables than the passes before it.

    A cache holds at least `known` tokens of each prompt; a pass reads at most `width` tokens of each; None: any number.
    """
    for boundary in boundaries(config):
        if max(prompts) + max_new_tokens <= boundary:
            continue
        # The prefill leaves out a prompt's last token.
        read = min(prompts) - 1
        if read <= boundary:
            raise UnsupportedOptionError(
                f"rotary tables of type 'longrope' change at {boundary} tokens, which this request of {max(prompts)} + "
                f"{max_new_tokens} tokens crosses, so that a block is not exact; lower max_new_tokens"
                + ("" if max(prompts) < boundary else " or shorten the prompt")
            )
        if width is not None and known + width <= boundary:
            raise UnsupportedOptionError(
                f"rotary tables of type 'longrope' change at {boundary} tokens, and prompts "
                f"are read {width} tokens at a time, first by other tables than later; read more at once, or shorten "
                f"prompt and max_new_tokens to {boundary} tokens together"
            )


def tables_of(config: PreTrainedConfig, length: int) -> int:
    """Return the number of the tables for a text of this length; 0: the tables of the shortest texts."""
    return sum(boundary < length for boundary in boundaries(config))


def tables_change(config: PreTrainedConfig, first: int, total: int) -> bool:
    """Return whether a pass over the `first` tokens of a text of `total` tokens uses other tables than a full pass."""
    return tables_of(config, first) != tables_of(config, total)
