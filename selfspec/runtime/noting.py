"""Note what a function of tensors computes as a graph, without computing it, and join what a program does in one.

`make_fx` notes more kinds of functions and takes several times as long, while somebody waits for tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec.formats.packed import PackedWeight
from selfspec.runtime.pass_function import PassFunction


@dataclass(frozen=True)
class Noted:
    """Holds the graph of a function's operations; `meta["val"]` of each node is its result on the meta device.

    `held` are tensors that are no arguments of the function, by the names that the graph reads them by.
    """

    graph: Graph
    held: Mapping[str, Tensor]


def noted(function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor]) -> Noted:
    """Note a function of CPU tensors with the sizes and strides of the examples; reading their values is an error."""
    notes = _Notes()
    # In inference mode torch takes operations apart before a dispatch mode sees them.
    with torch.inference_mode(False), torch.no_grad():
        places = (notes.graph.placeholder(f"given_{number}") for number in range(len(examples)))
        inputs = [_StandIn(place, form_of(example)) for place, example in zip(places, examples, strict=True)]
        with notes:
            results = function(*inputs)
    notes.graph.output(tuple(notes.node_of(each) for each in results))
    return Noted(notes.graph, notes.held)


def noted_pass(function: PassFunction, tensors: Sequence[Tensor], masks: Any) -> Noted:
    """Note a pass over tensors and then its masks, those of `mask_tensors`."""
    made = mask_tensors(masks)

    def whole(*given: Tensor) -> tuple[Tensor, ...]:
        by_type = dict(zip(made, given[len(tensors) :], strict=True))
        mask = {**masks, **by_type} if isinstance(masks, dict) else by_type[None]
        return function.masked(given[: len(tensors)], mask).flat()

    return noted(whole, [*tensors, *made.values()])


def mask_tensors(masks: Any) -> dict[str | None, Tensor]:
    """Return the masks of a pass, as `PassFunction.masks` gives them, by type of layers; None: of all."""
    by_type = masks if isinstance(masks, dict) else {None: masks}
    return {name: mask for name, mask in by_type.items() if mask is not None}


def is_noted(tensor: Tensor) -> bool:
    """Return whether a tensor stands for one in a pass that is being noted."""
    return isinstance(tensor, _StandIn)


class _StandIn(Tensor):
    """Stands for a tensor that nobody computes: the node that gives it, and the same on the meta device."""

    node: Node
    form: Tensor

    @staticmethod
    def __new__(cls, node: Node, form: Tensor) -> _StandIn:
        made: _StandIn = Tensor._make_wrapper_subclass(
            cls,
            form.size(),
            strides=form.stride(),
            storage_offset=form.storage_offset(),
            dtype=form.dtype,
            device=torch.device("cpu"),
        )
        made.node, made.form = node, form
        node.meta["val"] = form
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{function} reads a tensor outside of the pass")


class _Notes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self.held: dict[str, Tensor] = {}
        self._of_held: dict[int, _StandIn] = {}

    def node_of(self, tensor: Tensor) -> Node:
        """Return the node of a tensor that the function computes or holds."""
        return self._stand_in(tensor).node

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, PackedWeight) for kind in types):
            # It does the operation by others, which come here.
            return NotImplemented
        kwargs = kwargs or {}
        forms = {name: _mapped(each, self._form_of) for name, each in kwargs.items()}
        if "device" in forms:
            forms["device"] = "meta"
        found = function(*_mapped(args, self._form_of), **forms)
        node = self.graph.call_function(
            function, _mapped(args, self.node_of), {name: _mapped(each, self.node_of) for name, each in kwargs.items()}
        )
        if isinstance(found, Tensor):
            # What is written in place is the same tensor, as of now.
            if function._schema.is_mutable and isinstance(args[0], _StandIn):
                args[0].node = node
                node.meta["val"] = args[0].form
                return args[0]
            return _StandIn(node, found)
        node.meta["val"] = found
        parts = [
            _StandIn(self.graph.call_function(operator.getitem, (node, place)), each)
            for place, each in enumerate(found)
        ]
        return type(found)(parts)

    def _form_of(self, tensor: Tensor) -> Tensor:
        return self._stand_in(tensor).form

    def _stand_in(self, tensor: Tensor) -> _StandIn:
        if isinstance(tensor, _StandIn):
            return tensor
        if id(tensor) not in self._of_held:
            name = f"held_{len(self.held)}"
            self.held[name] = tensor
            self._of_held[id(tensor)] = _StandIn(self.graph.get_attr(name), form_of(tensor))
        return self._of_held[id(tensor)]


def form_of(tensor: Tensor) -> Tensor:
    """Return a tensor of the same sizes, strides and dtype on the meta device."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _mapped(argument: Any, of: Callable[[Tensor], Any]) -> Any:
    if isinstance(argument, Tensor):
        return of(argument)
    if isinstance(argument, list | tuple):
        return type(argument)([_mapped(each, of) for each in argument])
    return argument


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


def without_copies(graph: Graph) -> None:
    """Rewrite a graph in place, without what computes nothing in float32: copies, and changes of float dtypes."""
    for node in graph.nodes:
        if node.target in _SAME or _changes_float(node):
            node.replace_all_uses_with(node.args[0])


def joined(graph: Graph) -> None:
    """Rewrite a graph in place, with rotations, norms and gates as one node each; `meta` says in which dtype."""
    for match in (_rotation, _norm, _weighted, _narrowed, _gate):
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
    if is_call(node, aten.silu.default):
        return "silu"
    if is_call(node, aten.gelu.default):
        return "gelu_by_tanh" if node.kwargs.get("approximate", "none") == "tanh" else "gelu"
    return None


_Found = tuple[Any, tuple[Any, ...]] | None


def _rotation(node: Any) -> _Found:
    if (
        not is_call(node, aten.add.Tensor)
        or node.kwargs
        or not all(is_call(each, aten.mul.Tensor) for each in node.args)
    ):
        return None
    (states, cosines), (turned, sines) = (each.args for each in node.args)
    if not is_call(turned, aten.cat.default) or turned.args[1:] not in ((-1,), (3,)) or len(turned.args[0]) != 2:
        return None
    negative, left = turned.args[0]
    right: Any = negative.args[0] if is_call(negative, aten.neg.default) else None
    if not (is_call(left, aten.slice.Tensor) and is_call(right, aten.slice.Tensor)):
        return None
    half = left.args[3]
    of_left, of_right = (states, 3, 0, half), (states, 3, half, _EVERYTHING)
    if left.args != of_left or right.args != of_right or 2 * half != states.meta["val"].shape[-1]:
        return None
    return rotate, (states, cosines, sines, half)


def _norm(node: Any) -> _Found:
    for states, root in _either_way(node, aten.mul.Tensor):
        shifted: Any = root.args[0] if is_call(root, aten.rsqrt.default) else None
        mean: Any = shifted.args[0] if is_call(shifted, aten.add.Tensor) else None
        square: Any = mean.args[0] if is_call(mean, aten.mean.dim) and mean.args[1:] == ([-1], True) else None
        if (
            is_call(square, aten.pow.Tensor_Scalar)
            and square.args == (states, 2)
            and isinstance(shifted.args[1], float)
        ):
            return rms_norm, (before_change(states), None, shifted.args[1], 0.0)
    return None


def _weighted(node: Any) -> _Found:
    for changed, weight in _either_way(node, aten.mul.Tensor):
        normed = before_change(changed)
        if (
            not is_call(normed, rms_norm)
            or normed.args[1] is not None
            or len(normed.users) > 1
            or len(changed.users) > 1
        ):
            continue
        states, _, epsilon, _ = normed.args
        shift = 0.0
        if is_call(weight, aten.add.Tensor) and weight.args[1] == 1.0:
            weight, shift = weight.args[0], 1.0
        weight = before_change(weight)
        is_held = isinstance(weight, Node) and weight.op == "get_attr"
        if is_held and weight.meta["val"].shape == states.meta["val"].shape[-1:]:
            return rms_norm, (states, weight, epsilon, shift)
    return None


def _narrowed(node: Any) -> _Found:
    """Let a norm give the dtype to which it is changed."""
    norm = before_change(node)
    return (rms_norm, norm.args) if norm is not node and is_call(norm, rms_norm) and len(norm.users) == 1 else None


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
    if not is_call(node, target):
        return ()
    first, second = node.args
    return (first, second), (second, first)


def is_call(node: Any, target: Any) -> bool:
    """Return whether a node calls `target`."""
    return isinstance(node, Node) and node.op == "call_function" and node.target is target


def before_change(node: Any) -> Any:
    """Return the node whose float dtype a node changes; anything else as it is."""
    return node.args[0] if _changes_float(node) else node


def _changes_float(node: Any) -> bool:
    return is_call(node, aten._to_copy.default) and _is_float(node) and _is_float(node.args[0])


def _is_float(node: Any) -> bool:
    return isinstance(node, Node) and "val" in node.meta and node.meta["val"].dtype.is_floating_point
