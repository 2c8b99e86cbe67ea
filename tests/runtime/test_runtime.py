"""When a program has given what the stock modules gave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from selfspec.runtime import BatchInvariant, CudaGraphs, Eager, Native, Runtime, RuntimeName, runtime_named
from selfspec.runtime.runtime import close


@pytest.mark.parametrize(
    ("change", "closes"),
    [
        (lambda logits: logits * (1 + 1e-6), True),
        (lambda logits: logits * (1 + 1e-3), False),
        (lambda logits: logits.roll(1, -1), False),
        (lambda logits: torch.full_like(logits, torch.nan), False),
        (lambda logits: logits.float(), False),
        (lambda logits: logits[:1], False),
    ],
    ids=["rounding", "more", "another order", "nan", "another dtype", "another shape"],
)
def test_rounding_is_distinguished_from_all_else(change: Callable[[Tensor], Tensor], closes: bool) -> None:
    logits = torch.randn(2, 3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 0] = -torch.inf
    assert close((change(logits),), (logits,)) is closes
    assert not close((logits, logits), (logits,))


def test_drafts_may_be_further_off() -> None:
    logits = torch.randn(1, 1, 50)
    for error, closes in ((0.24, True), (0.26, False)):
        assert close((logits * (1 + error),), (logits,), 0.25) is closes


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
