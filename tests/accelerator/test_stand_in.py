"""The stand-in for an accelerator catches what a device would punish: each planted bug is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding

from helpers.accelerator.device import Accelerator, present
from selfspec.device import HostCopy, backend, to_device
from selfspec.errors import UnsupportedOptionError
from selfspec.model.checkpoint import find_device

pytestmark = pytest.mark.accelerator

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda found: found[0].item(),
    "tolist": lambda found: found.tolist(),
    "bool": lambda found: bool(found[0] > 0),
    "nonzero": lambda found: found.nonzero(),
    "chosen by a mask": lambda found: found[found > 0],
    "written by a mask": lambda found: found.index_put_((found > 0,), torch.tensor(0.0)),
    "copied into": lambda found: torch.empty(4).copy_(found),
    "made from numbers": lambda found: torch.tensor([1], device=found.device),
    "chosen by places of the host": lambda found: found[torch.tensor([0, 1])],
    "copied from memory that is not locked": lambda found: torch.zeros(4).to(found.device, non_blocking=True),
}
MIXES: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda found: found + torch.ones(4),
    "mask": lambda found: found.masked_fill(torch.ones(4, dtype=torch.bool), 0.0),
    "rows": lambda found: found.index_select(0, torch.tensor([0])),
    "embedding": lambda found: embedding(torch.tensor([0]), found[:, None]),
    "one after the other": lambda found: torch.cat([found, torch.ones(4)]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_who_reads_waits(accelerator: Accelerator, read: Callable[[Tensor], Any]) -> None:
    found = torch.ones(4, device=accelerator.device)
    assert accelerator.counts.waits == 0
    read(found)
    assert accelerator.counts.waits >= 1


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_the_hosts_tensors_do_not_mix_with_the_devices(accelerator: Accelerator, mix: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mix(torch.ones(4, device=accelerator.device))


def test_what_was_copied_without_waiting_is_nonsense_until_somebody_waits(accelerator: Accelerator) -> None:
    found = torch.arange(4, device=accelerator.device)
    late, values = found.to("cpu", non_blocking=True), found.double().to("cpu", non_blocking=True)
    assert late.tolist() != [0, 1, 2, 3]
    assert values.isnan().all()
    backend(accelerator.device).current_stream().synchronize()
    assert late.tolist() == values.tolist() == [0, 1, 2, 3]


def test_what_was_asked_for_before_somebody_waited_is_there_without_another_wait(accelerator: Accelerator) -> None:
    found = torch.arange(3, device=accelerator.device)
    early, late = HostCopy(found), found + 1
    late.tolist()
    with accelerator.counted() as counts:
        assert early.read().tolist() == [0, 1, 2]
    assert counts.waits == 0
    with accelerator.counted() as counts:
        assert HostCopy(late).read().tolist() == [1, 2, 3]
    assert counts.waits == 1


def test_memory_that_a_copy_still_reads_is_not_changed(accelerator: Accelerator) -> None:
    source = torch.zeros(4, pin_memory=True)
    found = source.to(accelerator.device, non_blocking=True)
    source.fill_(1.0)
    with pytest.raises(AssertionError, match="still to read"):
        found.tolist()


def test_memory_is_counted_and_runs_out_where_it_is_told_to(accelerator: Accelerator) -> None:
    before = accelerator.allocated
    found = torch.zeros(100, device=accelerator.device)
    view = found[10:]
    del found
    assert accelerator.allocated - before == 400
    del view
    assert accelerator.allocated == before
    accelerator.fails_at = accelerator.counts.allocations + 2
    kept = [torch.zeros(1, device=accelerator.device)]
    with pytest.raises(torch.OutOfMemoryError):
        kept.append(torch.zeros(1, device=accelerator.device))
    accelerator.capacity = accelerator.allocated + 3
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1, device=accelerator.device)


class _Captured:
    """A graph of an operation on one tensor."""

    def __init__(self, accelerator: Accelerator, launch: Callable[[Tensor], Tensor], given: Tensor) -> None:
        module = backend(accelerator.device)
        self.graph = module.CUDAGraph()
        with module.stream(module.Stream()):
            self.graph.capture_begin(pool=module.graph_pool_handle())
            try:
                self.output = launch(given)
            finally:
                self.graph.capture_end()


def test_a_graph_computes_from_what_lies_at_its_addresses(accelerator: Accelerator) -> None:
    given = torch.ones(3, device=accelerator.device)
    captured = _Captured(accelerator, lambda found: found.add_(1) * 2, given)
    assert given.tolist() == [1.0] * 3
    assert captured.output.isnan().all()
    given.copy_(torch.tensor([5.0, 6.0, 7.0]))
    captured.graph.replay()
    assert captured.output.tolist() == [12.0, 14.0, 16.0]
    assert given.tolist() == [6.0, 7.0, 8.0]


@pytest.mark.parametrize(
    "launch",
    [
        lambda found: found * found.sum().item(),
        lambda found: found[found > 0],
        lambda found: found + torch.tensor([1.0, 2.0, 3.0], device=found.device),
        lambda found: found + to_device([1.0, 2.0, 3.0], found.device),
    ],
    ids=["a value", "a mask", "numbers", "numbers in locked memory"],
)
def test_a_capture_refuses_what_a_graph_cannot_repeat(
    accelerator: Accelerator, launch: Callable[[Tensor], Tensor]
) -> None:
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        _Captured(accelerator, launch, torch.ones(3, device=accelerator.device))


def test_once_it_is_gone_no_device_of_a_number_is_found() -> None:
    with present():
        pass
    with pytest.raises(UnsupportedOptionError, match="not available here"):
        find_device(3)
