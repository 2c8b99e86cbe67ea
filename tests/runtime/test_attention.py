"""cuDNN's attention is off while passes run on a CUDA device, whatever threads there are, and as it was after them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers import tiny
from selfspec.runtime.attention import for_new_lengths
from selfspec.runtime.model_state import ModelState

CUDA, KERNELS = torch.device("cuda"), torch.backends.cuda
EVERY = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def enabled() -> bool:
    found: bool = KERNELS.cudnn_sdp_enabled()
    return found


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with sdpa_kernel(EVERY):
        yield


@pytest.mark.parametrize("before", [True, False])
def test_it_is_off_inside_and_as_it_was_outside(before: bool) -> None:
    KERNELS.enable_cudnn_sdp(before)
    with for_new_lengths(CUDA):
        assert not enabled()
        with for_new_lengths(CUDA):
            assert not enabled()
        assert not enabled()
    assert enabled() is before
    with pytest.raises(ValueError, match="inside"), for_new_lengths(CUDA):
        raise ValueError("inside")
    assert enabled() is before


def test_a_cpu_changes_no_setting() -> None:
    with for_new_lengths(torch.device("cpu")):
        assert enabled()


def test_whoever_allows_nothing_else_keeps_it() -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), for_new_lengths(CUDA):
        assert enabled()


def test_the_last_thread_to_leave_restores_it() -> None:
    entered, leave = threading.Event(), threading.Event()

    def passes() -> None:
        with for_new_lengths(CUDA):
            entered.set()
            leave.wait(10)

    other = threading.Thread(target=passes)
    with for_new_lengths(CUDA):
        other.start()
        assert entered.wait(10)
    assert not enabled()
    leave.set()
    other.join()
    assert enabled()


def test_what_a_recording_depends_on_is_the_same_inside_and_outside() -> None:
    state = ModelState(tiny.llama())
    with for_new_lengths(CUDA):
        assert state.holds()
    KERNELS.enable_cudnn_sdp(False)
    assert state.holds()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        KERNELS.enable_cudnn_sdp(False)
        alone = ModelState(tiny.llama())
        KERNELS.enable_cudnn_sdp(True)
        assert not alone.holds()
