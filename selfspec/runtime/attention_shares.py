"""Measure how much the target attends to each slot: a pass that records attention weights over all heads and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from selfspec.runtime.grouped_queries import asks_for_kernel, with_kernel, written_forward

_NAME = "selfspec_noted_attention"


@dataclass
class _Noted:
    """The kernel that an attention runs, and the list in which its weights are summed."""

    kernel: Callable[..., tuple[Tensor, Any]]
    shares: list[Tensor]


class AttentionShares:
    """A view of a model whose attentions over all slots record their weights.

    Args:
        model: neither changed nor copied.

    Attributes:
        module: the view.
        sees_any: whether some attention records its weights. An attention whose `forward` was replaced does not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module = with_kernel(model, _NAME, asks_for_kernel)
        stock = dict(model.named_modules())
        self._noting = {
            module: _kernel_of(stock[name])
            for name, module in self.module.named_modules()
            if asks_for_kernel(module) and module is not stock[name]
        }
        self.sees_any = bool(self._noting)

    @contextmanager
    def noted(self) -> Iterator[list[Tensor]]:
        """Record the weights of passes over one token of each row within this context: one tensor, `[rows, slots]`."""
        shares: list[Tensor] = []
        for module, kernel in self._noting.items():
            module.__dict__[_NAME] = _Noted(kernel, shares)
        try:
            yield shares
        finally:
            for module in self._noting:
                del module.__dict__[_NAME]


def _kernel_of(attention: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """Return the kernel that an attention asks for."""
    known = written_forward(attention).__globals__
    named: Any = known["ALL_ATTENTION_FUNCTIONS"]
    config: Any = attention.config
    kernel: Callable[..., tuple[Tensor, Any]] = named.get_interface(
        config._attn_implementation, known.get("eager_attention_forward")
    )
    return kernel


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, Any]:
    """Attend as `transformers` asks: queries `[rows, heads, 1, size]`, keys and values with as many heads or fewer."""
    noted: _Noted = module.__dict__[_NAME]
    if sliding_window is None:
        rows, _, _, size = query.shape
        groups = query.reshape(rows, key.shape[1], -1, size)
        scores = (groups @ key.transpose(2, 3)).float() * (size**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, -torch.inf)
        elif attention_mask is not None:
            scores = scores + attention_mask
        of_layer = scores.softmax(-1).sum((1, 2))
        noted.shares[:] = [sum((each.to(of_layer.device) for each in noted.shares), of_layer)]
    options = {"scaling": scaling, "softcap": softcap, "sliding_window": sliding_window}
    given = {name: option for name, option in options.items() if option is not None}
    return noted.kernel(module, query, key, value, attention_mask, **given, **others)


AttentionInterface.register(_NAME, _attend)
