"""Attention of a few tokens with grouped queries: key heads are read in place, not copied for each query.

`transformers` repeats keys and values for all heads of a group wherever there is a mask, since some GPU kernels want
it so: whole copies of the cache in each layer, for every pass over more than one token. The CPU's kernel reads shared
heads in place and gives the same bits; on a CUDA device one in Triton does, and gives the same up to rounding.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from selfspec.kernels.trial import runs_triton
from selfspec.model.view import runs_as_written, view_of, view_with

_NAME = "selfspec_grouped_sdpa"


def for_grouped_queries(module: nn.Module) -> nn.Module:
    """Make a view of a module whose attentions share key heads without copies; the module itself if none do.

    Args:
        module: a model on the sdpa kernel, or a part of one. It is neither changed nor copied.
    """
    return with_kernel(module, _NAME, _shares_heads)


def with_kernel(module: nn.Module, name: str, takes: Callable[[nn.Module], bool]) -> nn.Module:
    """Make a view of a module whose attentions ask for another kernel; the module itself if none do.

    Args:
        module: a model, or a part of one. It is neither changed nor copied.
        name: by which `transformers` knows the kernel.
        takes: whether an attention that asks its configuration for a kernel is to ask for this one.
    """
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
    if runs_triton(query.device) and _is_for_inference(query, key, value, attention_mask):
        from selfspec.kernels.triton_attention import tried_attention

        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
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
