"""Fewer operations in traced programs, with the same bits: between small products their number is what takes time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from selfspec.kernels import native

_EVERYTHING = 2**63 - 1


def drop_conversions(graph: Any) -> None:
    """Remove conversions to the dtype and device that a value has. Needs the types of a trace."""
    for node in _nodes(graph, "aten::to"):
        source, target = node.inputsAt(0), node.output()
        if _type_of(source) == _type_of(target) and not _copies(node):
            target.replaceAllUsesWith(source)
            node.destroy()


def fuse(graph: Any) -> None:
    """Remove what computes nothing, and join what one kernel computes with the same bits."""
    _drop_whole_slices(graph)
    _count_in_integers(graph)
    torch._C._jit_pass_dce(graph)
    torch._C._jit_pass_cse(graph)
    if native.are_loaded():
        _join_rotations(graph)
        _join_products(graph)


def _nodes(graph: Any, kind: str) -> Iterator[Any]:
    return iter([node for node in graph.nodes() if node.kind() == kind])


def _type_of(value: Any) -> tuple[object, ...]:
    """Dtype, device, sizes and strides of a tensor; what is not known is None."""
    kind = value.type()
    return kind.dtype(), kind.device(), kind.sizes(), kind.strides()


def _copies(node: Any) -> bool:
    return any(value.toIValue() is True for value in node.inputs())


def _drop_whole_slices(graph: Any) -> None:
    for node in _nodes(graph, "aten::slice"):
        first, end, step = (node.inputsAt(number).toIValue() for number in (2, 3, 4))
        if (first, end, step) == (0, _EVERYTHING, 1):
            node.output().replaceAllUsesWith(node.inputsAt(0))


def _count_in_integers(graph: Any) -> None:
    """Sizes are traced as tensors of one number, which are counted with and made integers again."""
    for node in _nodes(graph, "aten::Int"):
        made = node.inputsAt(0).node()
        if made.kind() == "prim::NumToTensor":
            node.output().replaceAllUsesWith(made.inputsAt(0))
        elif made.kind() == "aten::floor_divide":
            number, by = made.inputsAt(0).node(), made.inputsAt(1).toIValue()
            if number.kind() == "prim::NumToTensor" and by is not None:
                with graph.insert_point_guard(node):
                    divided = graph.insertNode(
                        graph.create("aten::floordiv", [number.inputsAt(0), graph.insertConstant(int(by))], 1)
                    )
                divided.output().setType(torch._C.IntType.get())
                node.output().replaceAllUsesWith(divided.output())


def _join_rotations(graph: Any) -> None:
    """Rotate by one kernel what `transformers` rotates by x cos + (-second half, first half) sin."""
    for node in _nodes(graph, "aten::add"):
        found = _rotation(node)
        if found is not None:
            with graph.insert_point_guard(node):
                rotated = graph.insertNode(graph.create("selfspec::rotate", found, 1))
            node.output().replaceAllUsesWith(rotated.output())


def _rotation(node: Any) -> list[Any] | None:
    """What is rotated, cosines, sines and half the size; None: this adds up something else."""
    straight, across = (_made(node.inputsAt(number), "aten::mul") for number in (0, 1))
    if straight is None or across is None or node.inputsAt(2).toIValue() != 1:
        return None
    turned = _made(across.inputsAt(0), "aten::cat")
    halves = [] if turned is None else list(turned.inputsAt(0).node().inputs())
    negative = _made(halves[0], "aten::neg") if len(halves) == 2 else None
    if turned is None or turned.inputsAt(1).toIValue() != -1 or negative is None:
        return None
    left, right = _made(halves[1], "aten::slice"), _made(negative.inputsAt(0), "aten::slice")
    if left is None or right is None:
        return None
    states, half = straight.inputsAt(0), left.inputsAt(3)
    same = [left.inputsAt(0), right.inputsAt(0)] == [states, states] and right.inputsAt(2) == half
    fixed = [[each.inputsAt(number).toIValue() for number in (1, 4)] for each in (left, right)]
    ends = (left.inputsAt(2).toIValue(), right.inputsAt(3).toIValue())
    if not same or fixed != [[3, 1], [3, 1]] or ends != (0, _EVERYTHING):
        return None
    return [states, straight.inputsAt(1), across.inputsAt(1), half]


def _made(value: Any, kind: str) -> Any | None:
    """The node that gives a value, if it is of this kind."""
    return value.node() if value.node().kind() == kind else None


def _join_products(graph: Any) -> None:
    """Multiply the same states with several weights at once, as queries, keys and values are: threads wake up once."""
    by_states: dict[int, list[Any]] = {}
    for node in _nodes(graph, "selfspec::few_rows"):
        by_states.setdefault(node.inputsAt(0).unique(), []).append(node)
    for first, *others in by_states.values():
        nodes = [first, *(node for node in others if _known_before(node, first))]
        if len(nodes) > 1:
            _join(graph, nodes)


def _known_before(node: Any, first: Any) -> bool:
    made = (value.node() for value in list(node.inputs())[1:])
    return all(each.kind() == "prim::Param" or each.isBefore(first) for each in made)


def _join(graph: Any, nodes: list[Any]) -> None:
    tensor = torch._C.TensorType.get()
    kinds = (tensor, torch._C.OptionalType(tensor), torch._C.OptionalType(tensor))
    with graph.insert_point_guard(nodes[0]):
        lists = []
        for number, kind in enumerate(kinds, 1):
            made = graph.insertNode(graph.create("prim::ListConstruct", [node.inputsAt(number) for node in nodes], 1))
            made.output().setType(torch._C.ListType(kind))
            lists.append(made.output())
        products = graph.insertNode(
            graph.create("selfspec::few_rows_together", [nodes[0].inputsAt(0), *lists], 1)
        ).output()
        products.setType(torch._C.ListType(tensor))
        each = graph.insertNode(graph.create("prim::ListUnpack", [products], len(nodes)))
    for node, product in zip(nodes, each.outputs(), strict=True):
        node.output().replaceAllUsesWith(product)
        node.destroy()
