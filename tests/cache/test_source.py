"""What an encoder has read, as tensors: all that passes find of it, or nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from selfspec.cache.source import Source, source_of

ROWS, PLACES, DEPTH = 3, 5, 2


def _read(source: Source, layers: int) -> list[Tensor]:
    made = []
    for layer in range(layers):
        keys, values = torch.randn(2, ROWS, 4, PLACES, 8)
        source.cross.update(keys, values, layer)
        made += [keys, values]
    return made


def _source(mask: Tensor | None) -> Source:
    return source_of(BaseModelOutput(last_hidden_state=torch.randn(ROWS, PLACES, 16)), mask)


def test_a_source_is_no_tensors_before_each_layer_has_read_it() -> None:
    source = _source(None)
    assert source.as_tensors(DEPTH) is None
    _read(source, 1)
    assert source.as_tensors(DEPTH) is None
    whole = source.as_tensors(1)
    assert whole is not None
    assert whole.mask is None
    assert len(whole.cross) == 2


def test_rows_that_are_left_have_their_own() -> None:
    mask = torch.tensor([[1] * 5, [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]])
    source = _source(mask)
    made = _read(source, DEPTH)
    whole = source.as_tensors(DEPTH)
    assert whole is not None
    assert whole.mask is not None
    assert torch.equal(whole.mask, mask.bool()[:, None, None])
    source.narrow([2, 0])
    left = source.as_tensors(DEPTH)
    assert left is not None
    assert left.mask is not None
    assert torch.equal(left.mask, whole.mask[[2, 0]])
    assert torch.equal(left.states, whole.states[[2, 0]])
    assert all(torch.equal(one, other[[2, 0]]) for one, other in zip(left.cross, made, strict=True))


def test_what_a_pass_reads_of_the_tensors_is_the_same() -> None:
    source = _source(torch.ones(ROWS, PLACES))
    made = _read(source, DEPTH)
    whole = source.as_tensors(DEPTH)
    assert whole is not None
    again = whole.source()
    assert again.beside(source.cross).is_updated == {0: True, 1: True}
    kept = [each for layer in again.cross.layers for each in (layer.keys, layer.values)]
    assert all(torch.equal(one, other) for one, other in zip(kept, made, strict=True))
    assert again.states is source.states


def test_rows_of_nothing_and_outputs_of_more_are_no_tensors() -> None:
    empty = torch.ones(ROWS, PLACES)
    empty[1] = 0
    source = _source(empty)
    _read(source, DEPTH)
    assert source.as_tensors(DEPTH) is None
    source = source_of(BaseModelOutputWithPooling(torch.randn(ROWS, PLACES, 16), torch.randn(ROWS, 16)), None)
    _read(source, DEPTH)
    assert source.as_tensors(DEPTH) is None
