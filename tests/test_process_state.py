"""Tests do not depend on each other: what one would leave to another is seen, and what they share is the same."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from helpers.process_state import changed, process_state


def _hook_on_all_modules() -> Any:
    handle: Any = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    return contextlib.closing(mock.Mock(close=handle.remove))


CHANGES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "grad mode": torch.no_grad,
    "kernels of attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "modes of torch": FakeTensorMode,
    "hooks on all modules": _hook_on_all_modules,
    "working folder": lambda: contextlib.chdir(Path.cwd().parent),
    "environment": lambda: mock.patch.dict(os.environ, SELFSPEC_PROFILES="elsewhere"),
}


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
