"""Runtimes by name."""

from __future__ import annotations

import pytest

from selfspec.runtime import BatchInvariant, CudaGraphs, Eager, Native, Runtime
from selfspec.runtime.named import RuntimeName, runtime_named

NAMED = {
    RuntimeName.EAGER: Eager(),
    RuntimeName.NATIVE: Native(),
    RuntimeName.GRAPHS: CudaGraphs(),
    RuntimeName.INVARIANT: BatchInvariant(),
}


@pytest.mark.parametrize("name", RuntimeName)
def test_every_name_has_its_runtime(name: RuntimeName) -> None:
    runtime: Runtime = NAMED[name]
    assert runtime_named(name) == runtime
    assert runtime_named(name, after=3).after == (3 if name in (RuntimeName.NATIVE, RuntimeName.GRAPHS) else None)
