"""Weights of a model in 4 bits whose errors are compensated on the states that texts give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.kernels.compensated import round_compensated
from selfspec.kernels.rounded import Precision, RoundedWeight, round_weight

# What moments may take at a time, besides the largest; every time all texts are read again.
_BYTES_AT_ONCE = 1 << 30

Weights = list[tuple[str, Tensor]]
"""With the parameters' names."""


def compensated_weights(
    model: PreTrainedModel, weights: Weights, precision: Precision, texts: Sequence[Tensor]
) -> Iterator[tuple[str, RoundedWeight]]:
    """Round weights to 4 bits so that errors make up for each other on what the layers are given in texts.

    Texts are token ids, `[rows, tokens]` each, without padding. Weights whose layer no text comes to, and experts, have
    fitted scales alone.
    """
    for some in _at_once(weights):
        moments = _input_moments(model, [name for name, weight in some if weight.ndim == 2], texts)
        for name, weight in some:
            of_layer = moments.pop(name, None)
            if of_layer is None:
                yield name, round_weight(weight, precision)
            else:
                yield name, round_compensated(weight, of_layer, precision)


def _at_once(weights: Weights) -> Iterator[Weights]:
    some: Weights = []
    taken = 0
    for name, weight in weights:
        taken += 4 * weight.shape[-1] ** 2
        if some and taken > _BYTES_AT_ONCE:
            yield some
            some, taken = [], 4 * weight.shape[-1] ** 2
        some.append((name, weight))
    yield some


@torch.no_grad()
def _input_moments(model: PreTrainedModel, weights: Iterable[str], texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Sum `x^T x` over the inputs `x` of layers as a model reads texts: `[in, in]` in float32, by the weights."""
    moments: dict[str, Tensor] = {}

    def add(weight: str, _layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        states = given[0].flatten(0, -2).float()
        moments[weight] = torch.addmm(moments.get(weight, states.new_zeros(1)), states.t(), states)

    with ExitStack() as hooks:
        for weight in weights:
            layer = model.get_submodule(weight.rpartition(".")[0])
            hooks.enter_context(layer.register_forward_pre_hook(partial(add, weight)))
        for text in texts:
            model(input_ids=text.to(model.device), use_cache=False)
    return moments
