"""Source of an encoder-decoder: the encoder's output for each row, and cross-attention's keys and values of it.

Cross-attention makes its keys and values once, in the first pass of the whole network. They do not depend on the row's
text and are never rolled back; draft and target read the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from selfspec.device import to_device


class Source:
    """Holds the encoder's output for some rows, and cross-attention's keys and values."""

    def __init__(self, outputs: ModelOutput, mask: Tensor | None) -> None:
        self.outputs = outputs  # tensors of the encoder's output, `[rows, places, ...]` each
        self.mask = mask  # marks places that hold input, as the model's `forward` takes it; None: all
        self.text: list[list[int]] | None = None  # input tokens of each row, if they are tokens of the decoder, too
        self.cross = DynamicCache()  # keys and values of cross-attention, for the layers that have made them
        self._as_tensors: ReadSource | None = None

    @property
    def states(self) -> Tensor:
        """The encoder's last states, `[rows, places, hidden]`."""
        states: Tensor = self.outputs.last_hidden_state
        return states

    @property
    def nbytes(self) -> int:
        """Bytes of the encoder's output and of keys and values."""
        kept = [tensor for layer in self.cross.layers for tensor in (layer.keys, layer.values) if tensor is not None]
        return sum(tensor.nbytes for tensor in [*kept, *_tensors(self.outputs).values()])

    def beside(self, cache: Cache) -> EncoderDecoderCache:
        """Return the cache argument of a stock model: the cache of the text, and this source's keys and values."""
        return EncoderDecoderCache(cache, self.cross)

    def as_tensors(self, depth: int) -> ReadSource | None:
        """Return all that passes of `depth` layers read of it; None where tensors of one length are not enough.

        They are not before each layer has made its keys and values, and where the encoder gives more than states or a
        row is all padding.
        """
        if self._as_tensors is None:
            kept = [each for layer in self.cross.layers for each in (layer.keys, layer.values) if each is not None]
            lengths = {each.shape[2] for each in kept}
            empty = self.mask is not None and not bool((self.mask != 0).flatten(1).any(1).all())
            if len(kept) < 2 * depth or len(lengths) > 1 or len(_tensors(self.outputs)) > 1 or empty:
                return None
            mask = self.mask
            if mask is not None and mask.shape == self.states.shape[:2]:
                mask = (mask != 0)[:, None, None]
            self._as_tensors = ReadSource(self.states, mask, tuple(kept))
        return self._as_tensors

    def narrow(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in the order given."""
        self._as_tensors = None
        index = to_device(rows, self.states.device)
        self.outputs = type(self.outputs)(**{name: each[index] for name, each in _tensors(self.outputs).items()})
        self.mask = None if self.mask is None else self.mask[index.to(self.mask.device)]
        self.text = None if self.text is None else [self.text[row] for row in rows]
        self.cross.batch_select_indices(index)


@dataclass(frozen=True)
class ReadSource:
    """Holds the tensors of a source whose layers have all made their keys and values."""

    states: Tensor  # the encoder's last states, `[rows, places, hidden]`
    mask: Tensor | None  # marks places that hold input, `[rows, 1, 1, places]`, or as the model takes it; None: all
    cross: tuple[Tensor, ...]  # keys and values of each layer in turn, `[rows, heads, places, head_dim]`

    def flat(self) -> tuple[Tensor, ...]:
        """Return all tensors: states, mask, then keys and values."""
        return (self.states, *(() if self.mask is None else (self.mask,)), *self.cross)

    def source(self) -> Source:
        """Return a source of these tensors, which a pass only reads."""
        source = Source(BaseModelOutput(last_hidden_state=self.states), self.mask)
        for keys, values in zip(self.cross[::2], self.cross[1::2], strict=True):
            layer = DynamicLayer()
            layer.keys, layer.values, layer.is_initialized = keys, values, True
            source.cross.layers.append(layer)
        return source


def _tensors(outputs: ModelOutput) -> dict[str, Any]:
    return {name: value for name, value in outputs.items() if isinstance(value, Tensor)}


def source_of(outputs: Any, mask: Tensor | None) -> Source:
    """Make a source from the encoder's output, possibly a tuple, that `generate` of `transformers` passes on."""
    if not isinstance(outputs, ModelOutput):
        outputs = BaseModelOutput(last_hidden_state=outputs[0])
    return Source(type(outputs)(**_tensors(outputs)), mask)
