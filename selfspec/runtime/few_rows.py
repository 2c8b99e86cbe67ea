"""Views of a model that compute few tokens fast: linear layers, attention with grouped queries and norms.

**Linear layers** run by the kernels of `selfspec.kernels.native` where they run, else with the weight on the left.
torch computes x W^T for one row at the speed of memory, but two to eight rows take 1.4 to 3 times as long without
AVX-512, which makes speculation useless; with AVX-512 this begins at more rows, and sixteen take up to twice as long as
(W x^T)^T, where the same kernels read the weight once for all rows. The kernels are faster than both, and than torch's
product of hundreds of rows. Processor, rows and width decide, as the stage `rows` of benchmarks/device showed. Weights
are not copied.

**Attention** reads key heads of grouped queries in place. Where there is a mask, `transformers` repeats keys and values
for all heads of a group, since some GPU kernels want it so: whole copies of the cache in each layer. The CPU's kernel
reads shared heads in place and gives the same bits; on a CUDA device one in Triton does, up to rounding.

**RMSNorm** runs in one step on the CPU: as six operations it takes longer than a product.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.pytorch_utils import Conv1D

from selfspec.formats.packed import PackedLinear, PackedWeight
from selfspec.kernels import native
from selfspec.kernels.crossover import crossover
from selfspec.kernels.trial import runs_triton
from selfspec.model.substitutes import experts_over_packed
from selfspec.model.view import is_streamed, runs_as_written, same_code, view_of, view_running, view_with
from selfspec.runtime.noting import is_noted

_DTYPES = (torch.float32, torch.float64)


def for_few_rows(module: nn.Module) -> nn.Module:
    """Make a view of a model, or a part of one, that computes few rows fast; itself if there is nothing to gain."""
    return view_of(module, _in_few_rows)


def _pays(width: int, rows: int) -> bool:
    """Return whether the weight on the left is faster, by the width of a layer's input and the number of rows."""
    # Choose by processor, not by timing: the product decides the last bits, and a seed must give the same tokens.
    several = torch.get_num_threads() > 1
    if not has_avx512():
        return 2 <= rows <= (8 if several else 4)
    return 8 <= rows <= 48 if width >= 512 else 16 <= rows <= 48 and several


def has_avx512() -> bool:
    """Return whether torch runs its kernels for AVX-512 here."""
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


def _in_few_rows(module: nn.Module, _: Mapping[str, nn.Module]) -> nn.Module | None:
    if type(module) is nn.Linear and is_streamed(module):
        return view_running(module, partial(_lent, module))
    if type(module) in (nn.Linear, Conv1D) and isinstance(module.weight, PackedWeight) and _runs_torchs_product():
        return view_running(module, partial(_packed, module))
    experts = experts_over_packed(module)
    if experts is not None:
        return experts
    if not is_plain(module):
        return None
    dtype = module.weight.dtype
    if dtype in native.DTYPES and native.available():
        return view_running(module, partial(_product, crossover().rows(dtype, module.in_features), module))
    return view_running(module, partial(_product, -1, module)) if dtype in _DTYPES else None


def _lent(linear: nn.Linear, states: Tensor) -> Tensor:
    with linear.__dict__["streams"]() as lent:
        given: Tensor = (_in_few_rows(lent, {}) or lent).forward(states)
        return given


def _packed(linear: nn.Linear | Conv1D, states: Tensor) -> Tensor:
    weight = linear.weight
    assert isinstance(weight, PackedWeight)
    assert isinstance(weight.layer, PackedLinear)
    product = weight.layer.product(states)
    return product if linear.bias is None else product + linear.bias


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


def _product(most: int, linear: nn.Linear, states: Tensor) -> Tensor:
    """Apply a layer to states, `[..., in]` to `[..., out]`; by the kernels up to `most` rows."""
    shape = [int(size) for size in states.shape]
    rows = math.prod(shape[:-1])
    # States with four dimensions are latents of a cache, which every pass expands: their rows are slots. A recorded
    # pass keeps the product that was chosen when it was made, and runs over any number of slots. Autocast changes what
    # torch's own products compute in: adding the bias later would round once more.
    is_stock = states.dim() > 3 or torch.is_autocast_enabled("cpu")
    if not is_stock and min(rows, native.MOST_ROWS) <= most:
        return native.few_rows(states, linear.weight, linear.bias)
    if is_stock or linear.weight.dtype not in _DTYPES or not _pays(linear.in_features, rows):
        return functional.linear(states, linear.weight, linear.bias)
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


_NAME = "selfspec_grouped_sdpa"


def for_grouped_queries(module: nn.Module) -> nn.Module:
    """Make a view of a module on the sdpa kernel whose attentions share key heads without copies; itself if none do."""
    return with_kernel(module, _NAME, _shares_heads)


def for_noting(module: nn.Module) -> nn.Module:
    """Make a view of a module on the sdpa kernel whose attentions are noted as one operator each, and run as usual."""
    return with_kernel(module, _NAME, runs_stock_kernel)


def with_kernel(module: nn.Module, name: str, takes: Callable[[nn.Module], bool]) -> nn.Module:
    """Make a view in which the attentions that `takes` accepts ask for the kernel `name`; the module itself if none."""
    return view_of(module, partial(_asking, name, takes, {}))


def _asking(
    name: str,
    takes: Callable[[nn.Module], bool],
    configs: dict[int, Any],
    module: nn.Module,
    others: Mapping[str, nn.Module],
) -> nn.Module | None:
    if not asks_for_kernel(module) or not takes(module):
        return None
    if id(module.config) not in configs:
        config: Any = copy.copy(module.config)
        config._attn_implementation_internal = name
        configs[id(module.config)] = config
    view = view_with(module, others)
    # Layers that had one configuration have one still.
    view.__dict__["config"] = configs[id(module.config)]
    return view


def asks_for_kernel(module: nn.Module) -> bool:
    """Return whether a module is an attention that asks its configuration for a kernel."""
    code = getattr(written_forward(module), "__code__", asks_for_kernel.__code__)
    return "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _shares_heads(module: nn.Module) -> bool:
    groups = getattr(module, "num_key_value_groups", 1)
    return isinstance(groups, int) and groups > 1 and runs_stock_kernel(module)


def written_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the `forward` of a module's class without decorators, which may accept older names."""
    forward: Callable[..., Any] = inspect.unwrap(type(module).forward)
    return forward


def runs_stock_kernel(module: nn.Module) -> bool:
    """Return whether an attention asks for sdpa, with the unchanged code of `transformers` and torch."""
    if getattr(getattr(module, "config", None), "_attn_implementation", None) != "sdpa":
        return False
    kernels = written_forward(module).__globals__.get("ALL_ATTENTION_FUNCTIONS", {})
    product = runs_as_written(functional.scaled_dot_product_attention, functional.__name__)
    return product and runs_as_written(kernels.get("sdpa"), sdpa_attention_forward.__module__)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as `transformers` asks: queries `[batch, heads, tokens, head_dim]`, keys and values with fewer heads."""

    def stock() -> Tensor:
        output: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )[0]
        return output

    usual = dropout == 0.0 and all(others.get(name) is None for name in _UNUSUAL)
    if attention_mask is None or not usual:
        return stock(), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if is_noted(query):
        return torch.ops.selfspec.attend(query, key, value, attention_mask, scale, 0.0), None
    if runs_triton(query.device) and _is_for_inference(query, key, value, attention_mask):
        from selfspec.kernels.triton_attention import tried_attention

        return tried_attention(query, key, value, attention_mask, scale, stock=stock), None
    if query.device.type != "cpu" or query.shape[2] == 1:
        return stock(), None
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


def _is_for_inference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Return whether attention is over few tokens, needs no gradient, and has one dtype for all inputs."""
    from selfspec.kernels.triton_attention import MOST_OFF, MOST_TOKENS

    alike = query.dtype in MOST_OFF and query.dtype == key.dtype == value.dtype
    free = not query.requires_grad and not torch.is_autocast_enabled(query.device.type)
    return alike and free and query.shape[2] <= MOST_TOKENS and mask.dim() == 4


_UNUSUAL = ("position_bias", "cache", "softcap")
AttentionInterface.register(_NAME, _attend)


def for_norms(module: nn.Module) -> nn.Module:
    """Make a view of a model, or a part of one, whose norms are one operation each; itself if there are none."""
    return view_of(module, _norm_in_one_step)


def _norm_in_one_step(module: nn.Module, _: Mapping[str, nn.Module]) -> nn.Module | None:
    weight = getattr(module, "weight", None)
    if type(weight) is not nn.Parameter or not same_code(type(module).forward, _rms_norm):
        return None
    if weight.device.type != "cpu" or weight.dtype not in native.IN_FLOAT32 or not native.available():
        return None

    def norm(states: Tensor) -> Tensor:
        if states.dtype != weight.dtype:
            return _rms_norm(module, states)
        return native.rms_norm(states, weight, module.variance_epsilon)  # type: ignore[arg-type]

    return view_running(module, norm)


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """Compute RMSNorm (Zhang and Sennrich, 2019) as the modules of `transformers` do, most of them to the letter."""
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)  # type: ignore[no-any-return]
