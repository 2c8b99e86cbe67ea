"""Linear layers over a few tokens on a CPU: by the extension if it was built, else with the weight on the left.

torch computes x W^T for one row as a matrix times a vector, at the speed of memory. More rows are much slower: without
AVX-512 two to eight rows take 1.4 to 3 times as long, which makes speculation useless; with AVX-512 this begins at more
rows, and sixteen rows take up to twice as long as with the weight as the left factor, (W x^T)^T, where the same kernels
read it once for all rows. The extension of `selfspec.kernels.native` is faster than both, and than torch's product of
hundreds of rows. Processor, rows and width decide which product runs, by benchmarks/few_rows.py. Weights are not
copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from selfspec.kernels import native
from selfspec.model.view import runs_as_written, view_of, view_running

Pays = Callable[[int, int], bool]
"""Return whether the weight on the left is faster, by the width of a layer's input and the number of rows."""

Product = Callable[[nn.Linear, Tensor], Tensor]
"""Apply a layer to states, `[..., in]`; returns `[..., out]`."""

_DTYPES = (torch.float32, torch.float64)


def for_few_rows(module: nn.Module) -> nn.Module:
    """Make a view of a model, or a part of one, that computes few rows fast; itself if there is nothing to gain."""
    # Choose by processor, not by timing: the product decides the last bits, and a seed must give the same tokens.
    on_the_left = partial(_on_the_left, _pays_with_avx512 if _has_avx512() else _pays_without_avx512)
    products: dict[torch.dtype, Product] = dict.fromkeys(_DTYPES, on_the_left)
    if native.load_kernels():
        products |= {dtype: partial(_native, products.get(dtype, _stock)) for dtype in native.DTYPES}
    return view_of(module, partial(_in_few_rows, products))


def _pays_without_avx512(_: int, rows: int) -> bool:
    return 2 <= rows <= (8 if torch.get_num_threads() > 1 else 4)


def _pays_with_avx512(width: int, rows: int) -> bool:
    if width >= 512:
        return 8 <= rows <= 48
    return 16 <= rows <= 48 and torch.get_num_threads() > 1


def most_native_rows(dtype: torch.dtype, width: int) -> int:
    """Return the most rows for which the extension's product is fastest, by dtype and inputs of the weight."""
    # For more rows in bfloat16 torch uses instructions of the processor; CPUs without AVX-512 were not measured.
    if dtype == torch.bfloat16 or not _has_avx512():
        return 16
    return 128 if width > 2048 else native.MOST_ROWS


def _has_avx512() -> bool:
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


def _in_few_rows(
    products: Mapping[torch.dtype, Product], module: nn.Module, _: Mapping[str, nn.Module]
) -> nn.Module | None:
    if not is_plain(module) or module.weight.dtype not in products:
        return None
    return view_running(module, partial(_of_tokens, products[module.weight.dtype], module))


def _of_tokens(product: Product, linear: nn.Linear, states: Tensor) -> Tensor:
    # States with four dimensions are latents of a cache, which every pass expands: their rows are slots. A recorded
    # pass keeps the product that was chosen when it was made, and runs over any number of slots.
    return _stock(linear, states) if states.dim() > 3 else product(linear, states)


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is torch's own linear layer, over a weight on the CPU."""
    if type(module) is not nn.Linear or not _runs_torchs_product():
        return False
    weight = module.weight
    # Quantised weights are parameters of another class.
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.is_contiguous()


def _runs_torchs_product() -> bool:
    product = runs_as_written(functional.linear, functional.__name__)
    return product and runs_as_written(nn.Linear.forward, nn.Linear.__module__)


def _stock(linear: nn.Linear, states: Tensor) -> Tensor:
    return functional.linear(states, linear.weight, linear.bias)


def _native(otherwise: Product, linear: nn.Linear, states: Tensor) -> Tensor:
    rows = math.prod(int(size) for size in states.shape[:-1])
    # Autocast changes what torch's own products compute in.
    if rows > most_native_rows(linear.weight.dtype, linear.in_features) or torch.is_autocast_enabled("cpu"):
        return otherwise(linear, states)
    return native.few_rows(states, linear.weight, linear.bias)


def _on_the_left(pays: Pays, linear: nn.Linear, states: Tensor) -> Tensor:
    shape = [int(size) for size in states.shape]
    rows = math.prod(shape[:-1])
    # In the dtype of autocast, adding the bias later would round once more.
    if torch.is_autocast_enabled("cpu") or not pays(linear.in_features, rows):
        return _stock(linear, states)
    block = states.reshape(rows, linear.in_features)
    if rows == 3:
        # Four columns take less time than three.
        block = functional.pad(block, (0, 0, 0, 1))
    product = torch.mm(linear.weight, block.t())
    if rows == 3:
        product = product[:, :rows]
    # Lay the result out by rows again: later operations, mainly products, are slow on columns.
    product = product.t().contiguous()
    if linear.bias is not None:
        product += linear.bias
    return product.view(*shape[:-1], linear.out_features)
