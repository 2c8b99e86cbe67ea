"""Threads of the kernels: those of torch's OpenMP, or their own where a process has none."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from selfspec.kernels import native

# A product of 64 outputs over 8 inputs, which are 0 to 7, and weights of 1 to 64.
_PROGRAM = """
import ctypes, os, sys, threading
library, threads = ctypes.CDLL(sys.argv[1]), int(sys.argv[2])
states = (ctypes.c_float * 8)(*range(8))
weight = (ctypes.c_float * 512)(*(float(output + 1) for output in range(64) for _ in range(8)))
words = (ctypes.c_int64 * 27)(0, 2, 0, 1, 8, 64, 0, 0, 0, 1, 0, *(6 * (-1, 0)), 2, 0, 1, 0)
library.selfspec_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)

def check():
    for _ in range(200):
        found = (ctypes.c_float * 64)()
        addresses = (ctypes.c_int64 * 3)(*map(ctypes.addressof, (states, weight, found)))
        library.selfspec_run(words, addresses, 3, threads)
        assert list(found) == [28.0 * (output + 1) for output in range(64)]

check()
callers = [threading.Thread(target=check) for _ in range(3)]
for each in callers: each.start()
for each in callers: each.join()
child = os.fork()
if child == 0:
    check()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert "torch" not in sys.modules
print("right")
"""


@pytest.mark.kernels
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_process_without_openmp_has_threads_of_its_own(threads: int) -> None:
    library: Any = native.library()
    command = [sys.executable, "-c", _PROGRAM, str(library.file), str(threads)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip() == "right"
