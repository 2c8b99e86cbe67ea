"""Notes what a function of tensors computes as a graph, without computing it.

`make_fx` does the same for more kinds of functions, and takes several times as long: a program is made while somebody
waits for tokens.
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


@dataclass(frozen=True)
class Noted:
    """The graph of a function's operations.

    Attributes:
        graph: the `meta["val"]` of each node is what it gives, on the meta device.
        held: tensors that are no arguments of the function, by the names that the graph reads them by.
    """

    graph: Graph
    held: Mapping[str, Tensor]


def noted(function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor]) -> Noted:
    """Note a function of tensors on the CPU, for tensors with the sizes and strides of the examples.

    Raises:
        NotImplementedError, RuntimeError: the function reads values of tensors.
    """
    notes = _Notes()
    # In inference mode torch takes operations apart before a dispatch mode sees them.
    with torch.inference_mode(False), torch.no_grad():
        inputs = [notes.given(example) for example in examples]
        with notes:
            results = function(*inputs)
    notes.graph.output(tuple(notes.node_of(each) for each in results))
    return Noted(notes.graph, notes.held)


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

    def given(self, example: Tensor) -> _StandIn:
        """Stand for an argument."""
        return _StandIn(self.graph.placeholder(f"given_{len(self.graph.nodes)}"), _form(example))

    def node_of(self, tensor: Tensor) -> Node:
        """Return the node of a tensor that the function computes or holds."""
        return self._stand_in(tensor).node

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
            self._of_held[id(tensor)] = _StandIn(self.graph.get_attr(name), _form(tensor))
        return self._of_held[id(tensor)]


def _form(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _mapped(argument: Any, of: Callable[[Tensor], Any]) -> Any:
    if isinstance(argument, Tensor):
        return of(argument)
    if isinstance(argument, list | tuple):
        return type(argument)([_mapped(each, of) for each in argument])
    return argument
