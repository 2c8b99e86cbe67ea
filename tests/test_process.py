"""What the process gives back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

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
