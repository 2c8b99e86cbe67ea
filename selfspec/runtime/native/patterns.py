"""Joins what the graph of a pass computes in several operations and a program in one: norms, rotations, gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

_SAME = (
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
)
_EVERYTHING = 2**63 - 1


def rotate(states: Any, cosines: Any, sines: Any, half: int) -> Any:
    """Stand for `x cos + (-second half, first half) sin` in a graph: states `[batch, heads, tokens, 2 half]`."""


def rms_norm(states: Any, weight: Any, epsilon: float, shift: float) -> Any:
    """Stand for `(weight + shift) x / sqrt(mean square + epsilon)` in a graph; without a weight it is 1."""


def gated(gate: str, states: Any, factor: Any) -> Any:
    """Stand for `activation(states) * factor` in a graph."""


def joined(graph: Graph) -> None:
    """Rewrite a graph in place. What computes nothing in float32 is gone: copies, and changes of float dtypes."""
    for node in graph.nodes:
        if node.target in _SAME or _changes_float(node):
            node.replace_all_uses_with(node.args[0])
    for match in (_rotation, _norm, _weighted, _gate):
        for node in graph.nodes:
            found = match(node)
            if found is not None:
                target, args = found
                with graph.inserting_before(node):
                    joint = graph.call_function(target, args)
                joint.meta = node.meta
                node.replace_all_uses_with(joint)
        graph.eliminate_dead_code()


def activation(node: Any) -> str | None:
    """Name the activation that a node computes; None: it is none that can be joined."""
    if _is(node, aten.silu.default):
        return "silu"
    if _is(node, aten.gelu.default):
        return "gelu_by_tanh" if node.kwargs.get("approximate", "none") == "tanh" else "gelu"
    return None


_Found = tuple[Any, tuple[Any, ...]] | None


def _rotation(node: Any) -> _Found:
    if not _is(node, aten.add.Tensor) or node.kwargs or not all(_is(each, aten.mul.Tensor) for each in node.args):
        return None
    (states, cosines), (turned, sines) = (each.args for each in node.args)
    if not _is(turned, aten.cat.default) or turned.args[1:] not in ((-1,), (3,)) or len(turned.args[0]) != 2:
        return None
    negative, left = turned.args[0]
    right: Any = negative.args[0] if _is(negative, aten.neg.default) else None
    if not (_is(left, aten.slice.Tensor) and _is(right, aten.slice.Tensor)):
        return None
    half = left.args[3]
    of_left, of_right = (states, 3, 0, half), (states, 3, half, _EVERYTHING)
    if left.args != of_left or right.args != of_right or 2 * half != states.meta["val"].shape[-1]:
        return None
    return rotate, (states, cosines, sines, half)


def _norm(node: Any) -> _Found:
    for states, root in _either_way(node, aten.mul.Tensor):
        shifted: Any = root.args[0] if _is(root, aten.rsqrt.default) else None
        mean: Any = shifted.args[0] if _is(shifted, aten.add.Tensor) else None
        square: Any = mean.args[0] if _is(mean, aten.mean.dim) and mean.args[1:] == ([-1], True) else None
        if _is(square, aten.pow.Tensor_Scalar) and square.args == (states, 2) and isinstance(shifted.args[1], float):
            return rms_norm, (states, None, shifted.args[1], 0.0)
    return None


def _weighted(node: Any) -> _Found:
    for normed, weight in _either_way(node, aten.mul.Tensor):
        if not _is(normed, rms_norm) or normed.args[1] is not None or len(normed.users) > 1:
            continue
        states, _, epsilon, _ = normed.args
        shift = 0.0
        if _is(weight, aten.add.Tensor) and weight.args[1] == 1.0:
            weight, shift = weight.args[0], 1.0
        if _is_held(weight) and weight.meta["val"].shape == states.meta["val"].shape[-1:]:
            return rms_norm, (states, weight, epsilon, shift)
    return None


def _gate(node: Any) -> _Found:
    for gate, factor in _either_way(node, aten.mul.Tensor):
        name = activation(gate)
        if name is not None and len(gate.users) == 1 and isinstance(factor, Node):
            states = gate.args[0]
            if factor.meta["val"].shape == states.meta["val"].shape:
                return gated, (name, states, factor)
    return None


def _either_way(node: Any, target: Any) -> Sequence[tuple[Any, Any]]:
    """Return the two arguments of a node, in both orders; nothing if the node has another target."""
    if not _is(node, target):
        return ()
    first, second = node.args
    return (first, second), (second, first)


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target is target


def _is_held(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "get_attr"


def _changes_float(node: Any) -> bool:
    return _is(node, aten._to_copy.default) and _is_float(node) and _is_float(node.args[0])


def _is_float(node: Any) -> bool:
    return isinstance(node, Node) and "val" in node.meta and node.meta["val"].dtype.is_floating_point
