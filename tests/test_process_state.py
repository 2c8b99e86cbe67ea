"""Tests do not depend on each other: what one would leave to another is seen, and what they share is the same."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers.utils import logging

from helpers.process_state import changed, process_state


@contextlib.contextmanager
def _set(setter: Callable[[Any], object], value: object, before: object) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def _hook_on_all_modules() -> Any:
    handle: Any = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    return contextlib.closing(mock.Mock(close=handle.remove))


CHANGES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "threads": lambda: _set(torch.set_num_threads, 2, 1),
    "default dtype": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: _set(torch.set_default_device, "meta", None),
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic algorithms": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "precision of float32 products": lambda: _set(torch.set_float32_matmul_precision, "medium", "highest"),
    "flushing of denormal numbers": lambda: _set(torch.set_flush_denormal, True, False),
    "oneDNN": lambda: _set(torch._C._set_mkldnn_enabled, False, True),
    "kernels of attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "modes of torch": FakeTensorMode,
    "hooks on all modules": _hook_on_all_modules,
    "log level of transformers": lambda: _set(logging.set_verbosity, logging.DEBUG, logging.get_verbosity()),
    "progress bars of transformers": lambda: _set(
        lambda on: logging.enable_progress_bar() if on else logging.disable_progress_bar(), False, True
    ),
    "garbage collector": lambda: _set(lambda on: gc.enable() if on else gc.disable(), False, True),
    "handlers of signals": lambda: _set(
        lambda handler: signal.signal(signal.SIGTERM, handler), signal.SIG_IGN, signal.getsignal(signal.SIGTERM)
    ),
    "working folder": lambda: contextlib.chdir(Path.cwd().parent),
    "environment": lambda: mock.patch.dict(os.environ, SELFSPEC_PROFILES="elsewhere"),
}


def test_every_setting_has_a_change_below() -> None:
    assert set(CHANGES) == set(process_state())


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_would_outlast_its_test_is_seen(name: str) -> None:
    before = process_state()
    with CHANGES[name]():
        left = changed(before, process_state())
        assert any(each.split(": ")[0] == name for each in left)
    assert not changed(before, process_state())


@pytest.fixture(scope="module")
def drawn() -> Tensor:
    """What a fixture draws that no test of this module has to itself."""
    return torch.rand(3)


def test_what_tests_share_does_not_depend_on_which_comes_first(drawn: Tensor) -> None:
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3))
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(3))
