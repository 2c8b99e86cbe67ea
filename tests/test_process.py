"""What the process gives back; and what tests would leave to each other in it is seen."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from helpers.snapshot import changed, process_state
from selfspec.process import status_bytes

_FREED = """
from selfspec.process import give_large_blocks_back, status_bytes
{prepare}
# The allocator learns from the largest that was freed.
del (largest := [bytearray(30 << 20)])[:]
before, kept, large = status_bytes("VmRSS"), [], []
for _ in range(40):
    large.append(bytearray(1 << 20))
    kept.append(bytearray(1 << 10))
del large
print(status_bytes("VmRSS") - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators")
def test_large_blocks_go_back_although_small_ones_beside_them_stay() -> None:
    left = {}
    for prepare in ("", "give_large_blocks_back()"):
        run = subprocess.run(
            [sys.executable, "-c", _FREED.format(prepare=prepare)], capture_output=True, text=True, check=True
        )
        left[prepare] = int(run.stdout)
    assert left[""] > 30 << 20
    assert left["give_large_blocks_back()"] < 5 << 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells of it")
def test_sizes_are_those_of_this_process() -> None:
    assert 0 < status_bytes("VmRSS") <= status_bytes("VmHWM")


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
