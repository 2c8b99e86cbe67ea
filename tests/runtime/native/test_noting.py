"""Graphs of functions that nobody computed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.runtime.native.noting import noted

WEIGHT = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))


def written(states: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    cache.index_copy_(0, torch.arange(2, device=states.device), states @ WEIGHT)
    return cache * 2, cache[:1]


def parted(states: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    first, last = states.split([1, 2], -1)
    return torch.cat([last, first], -1), states.transpose(0, 1)


def computed(function: Callable[..., Sequence[Tensor]], given: Sequence[Tensor]) -> list[Tensor]:
    """What the graph of a function gives."""
    found = noted(function, given)
    values: dict[Any, Any] = {}
    left = iter(given)
    for node in found.graph.nodes:
        match node.op:
            case "placeholder":
                values[node] = next(left)
            case "get_attr":
                values[node] = found.held[node.target]
            case "output":
                return [values[each] for each in node.args[0]]
            case _:
                args = torch.fx.node.map_arg(node.args, values.__getitem__)
                values[node] = node.target(*args, **torch.fx.node.map_arg(node.kwargs, values.__getitem__))
                if node.target is not operator.getitem and isinstance(values[node], Tensor):
                    assert values[node].stride() == node.meta["val"].stride()
    raise AssertionError("no output")


@pytest.mark.parametrize("function", [written, parted])
def test_a_graph_computes_what_the_function_does(function: Callable[..., Sequence[Tensor]]) -> None:
    with torch.no_grad():
        given = [torch.arange(6.0).reshape(2, 3), torch.zeros(5, 4)]
        wanted = [each.clone() for each in function(given[0], given[1].clone())]
        for found, expected in zip(computed(function, given), wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_graph_in_inference_mode_is_the_same() -> None:
    given = [torch.arange(6.0).reshape(2, 3), torch.zeros(5, 4)]
    with torch.inference_mode():
        inside = noted(written, [*map(torch.clone, given)])
    assert str(inside.graph) == str(noted(written, given).graph)


def test_nothing_is_computed() -> None:
    with torch.no_grad():
        given = [torch.arange(6.0).reshape(2, 3), torch.zeros(5, 4)]
        noted(written, given)
        assert not given[1].any()


def test_what_a_function_holds_is_held_itself_and_once() -> None:
    with torch.no_grad():
        found = noted(lambda states: (states @ WEIGHT, states @ WEIGHT), [torch.ones(2, 3)])
    (held,) = found.held.values()
    assert held is WEIGHT


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x.tolist()])
def test_a_function_that_reads_values_has_no_graph(read: Callable[[Tensor], object]) -> None:
    with torch.no_grad(), pytest.raises((RuntimeError, NotImplementedError)):
        noted(lambda x: (x * (2 if read(x) else 3),), [torch.ones(2)])
