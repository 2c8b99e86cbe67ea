"""Linear layers of a block of few tokens on a CPU: the same product with the weight on the left.

torch computes x W^T for one row as a matrix times a vector, at the speed of memory, and on processors without AVX-512
falls off a cliff from there: two to eight rows take 1.4 to 3 times as long, which alone kills speculation. With the
weight as the left factor, (W x^T)^T, the same kernels read it once for all rows. With AVX-512 the cliff comes after
three rows and the weight on the left only makes it higher; there packed weights help (`selfspec.pack`). Weights are
neither packed nor copied here. The figures are those of benchmarks/few_rows.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from selfspec.twin import twin_running, view_of

# Rows up to which the weight on the left was the faster way, on one thread and on several.
_MOST_ON_ONE_THREAD = 4
_MOST = 8
_DTYPES = (torch.float32, torch.float64)


def for_few_rows(module: nn.Module) -> nn.Module:
    """A view of a module that computes few rows fast; the module itself where there is nothing to gain.

    Args:
        module: a model, or a part of one. It is neither changed nor copied.
    """
    # By what the processor is, and not by a clock: the way decides the last bits, and a seed gives the same tokens.
    if "AVX512" in torch.backends.cpu.get_cpu_capability():
        return module
    return view_of(module, _in_few_rows)


def _in_few_rows(module: nn.Module, _: Mapping[str, nn.Module]) -> nn.Module | None:
    return twin_running(module, partial(_few_rows, module)) if _is_plain(module) else None


def _is_plain(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    # Quantised weights are parameters of a class of their own.
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in _DTYPES
        and weight.is_contiguous()
    )


def _few_rows(linear: nn.Module, states: Tensor) -> Tensor:
    assert isinstance(linear, nn.Linear)
    # Numbers, and no part of what a program may record.
    shape = [int(size) for size in states.shape]
    rows = math.prod(shape[:-1])
    if not 2 <= rows <= (_MOST if torch.get_num_threads() > 1 else _MOST_ON_ONE_THREAD):
        return functional.linear(states, linear.weight, linear.bias)
    block = states.reshape(rows, linear.in_features)
    if rows == 3:
        # Four columns take less time than three.
        block = functional.pad(block, (0, 0, 0, 1))
    product = torch.mm(linear.weight, block.t())
    if rows == 3:
        product = product[:, :rows]
    # Laid out by rows again: what comes next, another product above all, is slow on columns.
    product = product.t().contiguous()
    if linear.bias is not None:
        product += linear.bias
    return product.view(*shape[:-1], linear.out_features)
