"""Weights of a model in 4 bits whose errors are compensated on the states of sample texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.kernels.rounded import (
    Precision,
    RoundedWeight,
    column_sizes,
    evened,
    four_bits,
    in_pairs,
    nearest_levels,
    round_weight,
)

# Bytes of moments at a time (more if one is larger); all texts are read again each time.
_BYTES_AT_ONCE = 1 << 30

Weights = list[tuple[str, Tensor]]
"""Weights with their parameters' names."""


def compensated_weights(
    model: PreTrainedModel, weights: Weights, precision: Precision, texts: Sequence[Tensor]
) -> Iterator[tuple[str, RoundedWeight]]:
    """Round weights to 4 bits so that errors compensate each other on the layers' inputs in texts.

    Texts are token ids, `[rows, tokens]` each, without padding. Experts, and weights whose layer no text reaches, only
    get fitted scales.
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
    """Sum `x^T x` over the inputs `x` of layers as a model reads texts: `[in, in]` in float32, by weight."""
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


# Share of the mean second moment. No moment exceeds their sum, so it bounds the condition: float32 is enough.
_DAMPING = 0.05
# Number of values that are rounded at once, since they are copied to float32.
_AT_ONCE = 1 << 24
# Share of the mean input: smaller inputs get the factors of this one.
_LEAST_INPUT = 1e-3


@torch.no_grad()
def round_compensated(weight: Tensor, moments: Tensor, precision: Precision) -> RoundedWeight:
    """Round a weight to 4 bits, input by input: later inputs compensate the errors of earlier ones.

    Args:
        weight: `[out, in]`.
        moments: `x^T x` over inputs `x` of the layer, `[in, in]`, float32. If there are no inputs, or some are not
            finite, only scales are fitted.
        precision: 4 bits.

    Raises:
        RuntimeError: groups do not divide `in`.
    """
    mean = moments.diagonal().mean()
    if not (mean > 0 and mean.isfinite()):
        return round_weight(weight, precision)
    rounded = RoundedWeight.empty(weight.shape, precision, weight.device)
    rounded.factors.copy_(_factors(weight, moments))
    moments = moments * rounded.factors * rounded.factors[:, None]
    effects = _effects(moments, _DAMPING * moments.diagonal().mean())
    step = max(1, _AT_ONCE // weight.shape[1])
    for first in range(0, weight.shape[0], step):
        some = slice(first, first + step)
        # A copy, however the weight is laid out.
        left = evened(weight[some], rounded.factors).t().contiguous()
        _fill(rounded[some], left, effects, precision.group_size)
    return rounded


def _factors(weight: Tensor, moments: Tensor) -> Tensor:
    """Return the factors, `[in]`, that even out the sizes of inputs and columns."""
    inputs = moments.diagonal().sqrt()
    return (column_sizes(weight) / (inputs / inputs.mean()).clamp(min=_LEAST_INPUT)).sqrt()


def _effects(moments: Tensor, damping: Tensor) -> Tensor:
    """Return the upper triangular U with U^T U the inverse of the damped moments; row i: effects on later inputs."""
    damped = moments + damping * torch.eye(len(moments), device=moments.device)
    root = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    effects: Tensor = torch.linalg.solve_triangular(root, torch.eye(len(root), device=root.device), upper=True)
    return effects


def _fill(rounded: RoundedWeight, left: Tensor, effects: Tensor, group_size: int) -> None:
    """Round some outputs; `left`, `[in, out]`, is overwritten by the values left to round after each input."""
    assert rounded.zeros is not None
    for group in range(rounded.scales.shape[1]):
        first, end = group * group_size, (group + 1) * group_size
        fitted = four_bits(left[first:end].t(), group_size)
        scales, zeros = fitted.scales[:, 0].float(), fitted.zeros[:, 0].float()
        levels, errors = torch.empty_like(left[first:end]), torch.empty_like(left[first:end])
        for place, number in enumerate(range(first, end)):
            levels[place] = nearest_levels(left[number], scales, zeros)
            errors[place] = (left[number] - (levels[place] - 8) * scales - zeros) / effects[number, number]
            left[number + 1 : end].addr_(effects[number, number + 1 : end], errors[place], alpha=-1)
        left[end:].addmm_(effects[first:end, end:].t(), errors, alpha=-1)
        rounded.levels[:, first // 2 : end // 2] = in_pairs(levels.t())
        rounded.scales[:, group], rounded.zeros[:, group] = fitted.scales[:, 0], fitted.zeros[:, 0]
