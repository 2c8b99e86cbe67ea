"""Views of attention: without cuDNN on a CUDA device, or with a record of what is attended to.

cuDNN makes a plan for each new number of tokens and slots, which takes 40 ms on an H100 (torch 2.11), and every round
has new numbers. torch's other kernels take 0.1 ms and make no plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from selfspec.process import ProcessLock
from selfspec.runtime.few_rows import asks_for_kernel, with_kernel, written_forward


def for_new_lengths(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which attention is fast over new lengths; it restores torch's settings at its end."""
    return _WITHOUT_CUDNN if device.type == "cuda" else nullcontext()


def attends_by_cudnn() -> bool:
    """Return whether passes may use cuDNN's attention, also inside `for_new_lengths`: no other kernel may run."""
    kernels = torch.backends.cuda
    return bool(kernels.cudnn_sdp_enabled()) and not _allows_others()


def _allows_others() -> bool:
    kernels = torch.backends.cuda
    # A caller that allows only cuDNN must not be left without a kernel.
    return any((kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled()))


class _WithoutCudnn(AbstractContextManager[None]):
    """Turns cuDNN's attention off for all threads; the last thread to leave restores torch's process-wide setting."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._inside = 0
        self._changed = False

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._changed = _allows_others() and torch.backends.cuda.cudnn_sdp_enabled()
                if self._changed:
                    torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._changed:
                torch.backends.cuda.enable_cudnn_sdp(True)


_WITHOUT_CUDNN = _WithoutCudnn()


_NAME = "selfspec_noted_attention"


@dataclass
class _Noted:
    """The kernel that an attention runs, and the list in which its weights are summed."""

    kernel: Callable[..., tuple[Tensor, Any]]
    shares: list[Tensor]


class AttentionShares:
    """Makes a view of a model, `module`, whose attentions over all slots record their weights.

    `sees_any` is True if some attention records its weights; one whose `forward` was replaced does not.
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
