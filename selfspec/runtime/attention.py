"""Attention over new lengths: without cuDNN on a CUDA device.

cuDNN makes a plan for each new number of tokens and slots, which takes 40 ms on an H100 (torch 2.11), and every round
has new numbers. torch's other kernels take 0.1 ms and make no plans.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from selfspec.process import ProcessLock


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
