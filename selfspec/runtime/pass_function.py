"""Make a pass a function of tensors: a view of the stock model runs it; where it reads and writes is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig

from selfspec.architecture import takes
from selfspec.cache.cursors import OpenBlock
from selfspec.cache.masks import attention_mask
from selfspec.cache.shared_cache import LAYERS, SharedCache, Slots
from selfspec.cache.shared_layer import CacheKind, SharedLayer, from_host
from selfspec.cache.source import ReadSource, Source
from selfspec.device import on_host
from selfspec.model.gated_view import ExactStates, GatedModel
from selfspec.model.layer_path import LayerPath
from selfspec.model.positions import RowPositions
from selfspec.runtime.request import NO_LOGITS, PassRequest, PassResult, Runs


@dataclass(frozen=True)
class PassKind:
    """Holds what passes that one program can run have in common."""

    runs: Runs
    base: str | None  # attribute of the model that holds all but the head, and alone runs; None: the head runs too
    rows: int
    width: int  # tokens of each row
    embedded: bool  # True if it takes embeddings
    uniform: bool  # True if all rows write the same slots
    nodes: int | None  # number of nodes of the tree that it reads; None: a chain
    padded: bool  # True if slots past the last token may be seen, and are masked
    entering: tuple[str, ...] | None  # names of the attentions whose outputs enter with states; None: no states enter
    kept: CacheKind = "exact"
    masked_source: bool | None = None  # True if some of what an encoder has read may be hidden; None: none has

    @property
    def path(self) -> LayerPath:
        """Path of the passes."""
        return self.runs.path

    def covers(self, other: PassKind) -> bool:
        """Return whether its program runs passes of another kind, with more tokens behind."""
        return other.width < self.width and replace(other, width=self.width) == self


@dataclass(frozen=True)
class PassTensors:
    """Holds the arguments of a pass, also as a flat tuple of tensors.

    Tokens are `[rows, width]`, or embeddings, `[rows, width, hidden]`; `entering` enters at the start of the path.
    """

    tokens: Tensor
    entering: ExactStates | None
    slots: Slots
    source: ReadSource | None = None

    @classmethod
    def of(cls, request: PassRequest, cache: SharedCache) -> PassTensors | None:
        """Return the tensors of a pass over a cache; None: tensors cannot describe it."""
        slots = cache.slots(request.width, request.first, request.path.window)
        source = None if cache.source is None else cache.source.as_tensors(request.path.depth)
        if slots is None or (cache.source is not None and source is None):
            return None
        return cls(request.tokens, request.entering, slots, source)

    def flat(self) -> tuple[Tensor, ...]:
        """Return all tensors, in the order that `PassFunction` reads."""
        slots = self.slots
        entering = () if self.entering is None else (self.entering.hidden, *self.entering.attention.values())
        block = () if slots.block is None else slots.block.tensors
        places = (slots.slot_mapping, slots.positions, slots.visible, *block)
        source = () if self.source is None else self.source.flat()
        return (self.tokens, *places, *entering, *source, *slots.buffers)


@dataclass(frozen=True)
class PassFunction:
    """Maps the tensors of `PassTensors.flat` to those of `PassResult.flat` and `written`, by a pass through `view`.

    `placed` tells the view where each row is, for models that count that by the length of their cache.
    """

    view: GatedModel
    kind: PassKind
    cache_name: str
    config: PreTrainedConfig
    dtype: torch.dtype
    takes_positions: bool = True
    placed: RowPositions | None = None

    def __call__(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        result = self.masked(tensors, self.masks(tensors, self.kind.padded))
        return (*result.flat(), *result.written)

    def masks(self, tensors: tuple[Tensor, ...], padded: bool = True) -> Any:
        """Return the model's mask, a tensor or a dict of tensors; None if it needs none, and nothing is `padded`."""
        parts = self._parted(tensors)
        slots, rows = parts.slots, parts.tokens.shape[0]
        return attention_mask(
            self.config,
            slots.slot_mapping,
            rows,
            slots.visible.shape[0],
            self.dtype,
            block=slots.block,
            padded=padded,
            window=slots.window,
        )

    def masked(self, tensors: tuple[Tensor, ...], mask: Any) -> PassResult:
        """Return the results of the pass under a mask."""
        parts = self._parted(tensors)
        slots, source = parts.slots, None if parts.source is None else parts.source.source()
        own = SlotCache(slots, self.kind.padded, LAYERS[self.kind.kept])
        cache: Cache = own if source is None else source.beside(own)
        if self.placed is not None:
            self.placed.place(slots.positions)
        positions = slots.positions if self.takes_positions else None
        inputs = {self.cache_name: cache, **model_inputs(parts.tokens, positions, mask)}
        result = run_view(self.view, self.kind.base, parts.entering, inputs, source)
        return replace(result, written=own.written)

    def _parted(self, tensors: tuple[Tensor, ...]) -> PassTensors:
        tokens, slot_mapping, positions, visible, *rest = tensors
        block = None
        if self.kind.nodes is not None:
            start, depths, sees, *rest = rest
            block = OpenBlock(start, depths, sees)
        entering = None
        if self.kind.entering is not None:
            hidden, *rest = rest
            count = len(self.kind.entering)
            attention = dict(zip(self.kind.entering, rest[:count], strict=True))
            entering, rest = ExactStates(hidden, attention), rest[count:]
        source = None
        if self.kind.masked_source is not None:
            states, *rest = rest
            masks, rest = rest[: self.kind.masked_source], rest[self.kind.masked_source :]
            count = 2 * self.kind.path.depth
            source, rest = ReadSource(states, next(iter(masks), None), tuple(rest[:count])), rest[count:]
        slots = Slots(slot_mapping, positions, visible, tuple(rest), block, self.kind.path.window)
        return PassTensors(tokens, entering, slots, source)


def model_inputs(tokens: Tensor, positions: Tensor | None, mask: Any) -> dict[str, Any]:
    """Return a stock model's arguments besides its cache: tokens or embeddings, and positions, `[rows or 1, width]`."""
    return {
        **({} if positions is None else {"position_ids": positions}),
        "inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens,
        "attention_mask": mask,
        "use_cache": True,
        "output_attentions": False,
        "output_hidden_states": False,
        "return_dict": True,
    }


def beside_source(module: nn.Module, inputs: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return the arguments of an encoder-decoder, or its decoder, for a source that is already read."""
    if takes(module, "encoder_outputs"):
        names = {name: f"decoder_{name}" for name in _OF_DECODER}
        beside: dict[str, Any] = {"encoder_outputs": source.outputs, "attention_mask": source.mask}
    else:
        names, beside = {}, {"encoder_hidden_states": source.states, "encoder_attention_mask": source.mask}
    return {names.get(name, name): value for name, value in inputs.items()} | beside


_OF_DECODER = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")


def run_view(
    view: GatedModel,
    base: str | None,
    entering: ExactStates | None,
    inputs: Mapping[str, Any],
    source: Source | None = None,
) -> PassResult:
    """Run a view of a model on the inputs of its text; `base` is as in `PassKind`, `entering` as in `PassTensors`."""
    view.enter(entering)
    module: nn.Module = view.module if base is None else view.module.get_submodule(base)
    output = module(**(inputs if source is None else beside_source(module, inputs, source)))
    return PassResult(output.logits if base is None else NO_LOGITS, view.leave(), view.features())


class SlotCache(Cache):
    """Stands in for the cache of a stock model; `padded`: slots past the pass's tokens may be visible.

    Where slots are on the host, `written` has what they are to keep: a program knows no slot to copy it to.
    """

    def __init__(self, slots: Slots, padded: bool, layer: type[SharedLayer]) -> None:
        super().__init__(layers=[])
        self._slot_mapping = slots.slot_mapping
        self._visible = slots.visible
        parts = [slots.buffers[number :: len(layer.names)] for number in range(len(layer.names))]
        self._layer, self._buffers = layer, tuple(zip(*parts, strict=True))
        self._padded = padded
        self._written: dict[int, list[Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values, `[batch, heads, width, head_dim]`; return all that the pass may see."""
        buffers, kept = self._buffers[layer_idx], self._layer.kept(key_states, value_states)
        if on_host(buffers[0].device) and not on_host(key_states.device):
            self._written[layer_idx] = kept
        seen = [self._updated(buffer, states) for buffer, states in zip(buffers, kept, strict=True)]
        return self._layer.read(seen, key_states.dtype)

    @property
    def written(self) -> tuple[Tensor, ...]:
        """Parts of each layer in turn, empty ones of layers that did not run; none where slots are on the device."""
        if not self._written:
            return ()
        empty = [self._slot_mapping.new_empty(0)] * len(self._layer.names)
        return tuple(part for layer in range(len(self._buffers)) for part in self._written.get(layer, empty))

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the number of slots before the pass's tokens; a tensor if only the device knows it."""
        if self._padded:
            return self._slot_mapping[:, 0].amax()
        return self._visible.shape[0] - self._slot_mapping.shape[1]

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Return the slot of the pass's first token."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[Any, int]:
        """Return the number of slots that the pass reads, and the first of them."""
        return self._visible.shape[0], 0

    def _updated(self, buffer: Tensor, states: Tensor) -> Tensor:
        if on_host(buffer.device) and not on_host(states.device):
            buffer = from_host(buffer, self._visible.shape[0], states.device)
        slots = self._slot_mapping.to(buffer.device)
        if slots.shape[0] == 1:
            buffer.index_copy_(2, slots[0], states.to(buffer.dtype))
        else:
            rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
            buffer[rows, :, slots] = states.transpose(1, 2)
        return buffer[:, :, : self._visible.shape[0]]
