"""Turn the graph of a pass into operations of a native program."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from selfspec.kernels.native import FLOAT64, FLOAT_COLUMNS, HELD, IN_FLOAT32, MOST_ROWS, NUMBERS, PARTS, Kind, all_parts
from selfspec.runtime import noting
from selfspec.runtime.native.instructions import (
    DIMS,
    MOST_NODES,
    NOWHERE,
    Function,
    Operation,
    Place,
    Sight,
    Storage,
    Word,
)
from selfspec.runtime.noting import Noted, form_of
from selfspec.runtime.runtime import RecordingError

aten = torch.ops.aten

_ACTIVATIONS = {"silu": Function.SILU, "gelu": Function.GELU, "gelu_by_tanh": Function.GELU_BY_TANH}
_GATES = {"silu": Function.SILU_TIMES, "gelu": Function.GELU_TIMES, "gelu_by_tanh": Function.GELU_BY_TANH_TIMES}
_MAPS = {
    aten.neg.default: Function.NEGATIVE,
    aten.cos.default: Function.COSINE,
    aten.sin.default: Function.SINE,
    aten.tanh.default: Function.TANH,
    aten.sigmoid.default: Function.SIGMOID,
    aten.relu.default: Function.RELU,
    aten.exp.default: Function.EXPONENTIAL,
    aten.rsqrt.default: Function.ROOT_OF_INVERSE,
    aten.pow.Tensor_Scalar: Function.POWER,
    aten.sub.Tensor: Function.DIFFERENCE,
    aten.mul.Tensor: Function.MULTIPLY,
    aten.mul.Scalar: Function.MULTIPLY,
    aten.div.Tensor: Function.QUOTIENT,
    aten._to_copy.default: Function.COPY,
}
_VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.t.default,
)


_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int)


@dataclass(frozen=True)
class Value:
    """Holds a tensor of the graph."""

    storage: Storage
    layout: Tensor  # its sizes, strides, offset and dtype, on the meta device. A program keeps tensors in float32

    @property
    def place(self) -> Place:
        """Where it begins."""
        return Place(self.storage, int(self.layout.storage_offset()) * self.layout.element_size())


@dataclass(frozen=True)
class Lowered:
    """Holds a pass as operations; `shapes` are those of its results, which are the last arguments of a call."""

    operations: tuple[Operation, ...]
    shapes: tuple[torch.Size, ...]


class Lowering:
    """Lowers the graph of a captured pass, which it rewrites.

    The last arguments of the graph are `buffers` keys and values, then a mask for each of `sights`. `uniform`: all rows
    write the same slots; `tree`: the pass reads nodes of a tree. `source` are places of arguments that an encoder has
    read, which may have other lengths in other calls.
    """

    def __init__(
        self, noted: Noted, sights: Sequence[Sight], uniform: bool, tree: bool, buffers: int, source: Sequence[int]
    ) -> None:
        noting.without_copies(noted.graph)
        noting.joined(noted.graph)
        self._noted = noted
        self._sights = sights
        self._uniform, self._tree = uniform, tree
        self._buffers = buffers
        self._of_source = source
        # Attention alone reads these, since their lengths are those of a call.
        self._source: dict[Node, Value] = {}
        self._shifted: dict[Node, tuple[Node, int]] = {}
        self._values: dict[Node, Value] = {}
        self._masks: dict[Node, Sight] = {}
        self._parts: dict[Node, list[Value]] = {}
        self._operations: list[Operation] = []
        self._products: dict[int, Operation] = {}
        self._held: dict[int, Value] = {}
        self._caches: set[int] = set()
        self._handlers: dict[Any, Callable[[Node], Value | None]] = {
            aten.embedding.default: lambda node: self._looked_up(*node.args[:2]),
            aten.index.Tensor: self._chosen_rows,
            aten.add.Tensor: self._add,
            aten.arange.default: lambda node: self._constant(aten.arange.default(*node.args, **node.kwargs)),
            aten.cat.default: self._cat,
            aten.zeros_like.default: lambda node: self._map(Function.COPY, [0.0], self._new(node.meta["val"].shape)),
            aten.native_layer_norm.default: self._layer_norm,
            aten.index_copy_.default: self._write,
            aten.index_put_.default: self._write_by_row,
            aten.silu.default: self._activation,
            aten.gelu.default: self._activation,
            aten.addmm.default: self._product_of_columns,
            aten.mm.default: self._product_of_columns,
            torch.ops.selfspec.few_rows.default: self._product,
            torch.ops.selfspec.rows_packed.default: self._rows_of_packed,
            torch.ops.selfspec.rms_norm.default: self._rms_norm,
            torch.ops.selfspec.attend.default: self._attend,
            noting.rms_norm: self._rms_norm,
            noting.rotate: self._rotate,
            noting.gated: self._gated,
        }

    def run(self) -> Lowered:
        """Return its operations. RecordingError: it computes what programs do not."""
        nodes = list(self._noted.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        arguments = len(inputs) - len(self._sights)
        for number, node in enumerate(inputs[:arguments]):
            value = Value(Storage(argument=number), form_of(node.meta["val"]))
            (self._source if number in self._of_source else self._values)[node] = value
            if number >= arguments - self._buffers:
                self._caches.add(id(value.storage))
        self._masks = dict(zip(inputs[arguments:], self._sights, strict=True))
        for node in nodes:
            if node.op == "get_attr":
                self._values[node] = self._constant(self._noted.held[str(node.target)])
            elif node.op == "call_function":
                found = self._lower(node)
                if found is not None:
                    self._values[node] = found
        results = nodes[-1].args[0]
        shapes = [self._result(self._values[node], arguments + number) for number, node in enumerate(results)]
        return Lowered(tuple(self._operations), tuple(shapes))

    def _lower(self, node: Any) -> Value | None:
        if node.target in self._handlers:
            return self._handlers[node.target](node)
        if node.target in _VIEWS:
            return self._view(node)
        if node.target in _MAPS:
            return self._map_of(node, _MAPS[node.target])
        if node.target in _SPLITS:
            value = self._value(node.args[0])
            layouts = node.target(value.layout, *node.args[1:], **node.kwargs)
            self._parts[node] = [Value(value.storage, layout) for layout in layouts]
            return None
        if node.target is operator.getitem:
            whole, number = node.args
            return self._parts[whole][number] if whole in self._parts else self._value(whole)
        raise RecordingError(f"programs do not know {node.target}")

    def _value(self, argument: Any) -> Value:
        if not isinstance(argument, Node) or argument not in self._values:
            raise RecordingError(f"programs do not know {argument} here")
        return self._values[argument]

    def _constant(self, tensor: Tensor) -> Value:
        if id(tensor) not in self._held:
            if tensor.layout is not torch.strided or tensor.dtype not in (*NUMBERS, torch.int32):
                raise RecordingError(f"programs do not know weights in {tensor.layout} and {tensor.dtype}")
            self._held[id(tensor)] = Value(Storage(constant=tensor), form_of(tensor))
        return self._held[id(tensor)]

    def _new(self, shape: Sequence[int]) -> Value:
        return Value(Storage(numbers=math.prod(shape)), torch.empty(tuple(shape), device="meta"))

    def _emit(self, kind: Kind, words: list[Word], result: Value) -> Value:
        self._operations.append(Operation(kind, words, result.storage))
        return result

    # Views and copies.

    def _view(self, node: Any) -> Value | None:
        if node.args[0] in self._masks:
            self._masks[node] = self._masks[node.args[0]]
            return None
        value = self._value(node.args[0])
        try:
            return Value(value.storage, node.target(value.layout, *node.args[1:], **node.kwargs))
        except RuntimeError:
            # It does not fit the strides.
            copy = self._copied(value)
        return Value(copy.storage, node.target(copy.layout, *node.args[1:], **node.kwargs))

    def _copied(self, value: Value) -> Value:
        return self._map(Function.COPY, [value], self._new(value.layout.shape))

    def _contiguous(self, value: Value) -> Value:
        """Return the value in float32, its numbers side by side."""
        if id(value.storage) in self._caches:
            raise RecordingError("a pass reads its cache otherwise than by attention")
        fits = value.layout.dtype == torch.float32 or value.storage.is_temporary
        return value if fits and value.layout.is_contiguous() else self._copied(value)

    def _rows(self, value: Value) -> Value:
        """Return the value in float32, with the numbers of its last dimension side by side."""
        fits = value.layout.stride(-1) == 1 and value.layout.dtype == torch.float32
        return value if fits else self._copied(value)

    def _result(self, value: Value, argument: int) -> torch.Size:
        storage, layout = value.storage, value.layout
        whole = layout.is_contiguous() and storage.is_temporary and storage.numbers == layout.numel()
        if whole:
            storage.argument = argument
        else:
            self._map(Function.COPY, [value], Value(Storage(argument=argument), form_of(torch.empty(layout.shape))))
        return layout.shape

    # Maps.

    def _map_of(self, node: Any, function: Function) -> Value:
        if node.kwargs.keys() - {"dtype"}:
            raise RecordingError(f"programs do not know {node.target} with {', '.join(node.kwargs)}")
        to = node.kwargs.get("dtype")
        if to is not None and not to.is_floating_point:
            raise RecordingError("programs compute with floats")
        sources = [each if isinstance(each, int | float) else self._value(each) for each in node.args]
        return self._map(function, sources, self._new(node.meta["val"].shape))

    def _map(self, function: Function, sources: Sequence[Value | float], result: Value) -> Value:
        sizes = result.layout.shape
        if len(sizes) > DIMS or not 1 <= len(sources) <= 2:
            raise RecordingError(f"programs do not map {len(sources)} tensors of {len(sizes)} dimensions")
        missing = DIMS - len(sizes)
        words: list[Word] = [function, *[1] * missing, *sizes, len(sources)]
        for source in sources:
            if isinstance(source, Value):
                if id(source.storage) in self._caches:
                    raise RecordingError("a pass reads its cache otherwise than by attention")
                layout = source.layout.expand(sizes)
                words += [NUMBERS[layout.dtype], source.place, *[0] * missing, *layout.stride(), 0.0]
            else:
                words += [0, NOWHERE, *[0] * DIMS, float(source)]
        strides = result.layout.stride() if sizes else ()
        return self._emit(Kind.MAP, [*words, result.place, *[0] * missing, *strides], result)

    def _activation(self, node: Any) -> Value:
        name = noting.activation(node)
        assert name is not None
        return self._map(_ACTIVATIONS[name], [self._value(node.args[0])], self._new(node.meta["val"].shape))

    def _gated(self, node: Any) -> Value:
        name, states, factor = node.args
        sources = [self._value(states), self._value(factor)]
        return self._map(_GATES[str(name)], sources, self._new(node.meta["val"].shape))

    def _cat(self, node: Any) -> Value:
        parts, dim = [self._value(each) for each in node.args[0]], node.args[1] if len(node.args) > 1 else 0
        whole, first = self._new(node.meta["val"].shape), 0
        for part in parts:
            size = part.layout.shape[dim]
            self._map(Function.COPY, [part], Value(whole.storage, whole.layout.narrow(dim, first, size)))
            first += size
        return whole

    def _add(self, node: Any) -> Value | None:
        if node.kwargs:
            raise RecordingError("programs add without factors")
        if not node.meta["val"].is_floating_point() and isinstance(node.args[1], int):
            # Numbers of rows, further down a table.
            self._shifted[node] = node.args
            return None
        for product, added in (node.args, reversed(node.args)):
            joint = self._added_to_product(product, added)
            if joint is not None:
                return joint
        return self._map_of(node, Function.SUM)

    def _added_to_product(self, node: Any, added: Any) -> Value | None:
        """Add to a product while it is computed, where nothing else reads it."""
        if not isinstance(node, Node) or not isinstance(added, Node) or len(node.users) > 1:
            return None
        value, other = self._value(node), self._value(added)
        operation = self._products.get(id(value.storage))
        if operation is None or node.target in _VIEWS:
            return None
        is_bias = other.storage.constant is not None and other.layout.shape == value.layout.shape[-1:]
        place = _BIAS if is_bias else _RESIDUAL
        if operation.words[_RESIDUAL] is not NOWHERE or operation.words[place] is not NOWHERE:
            return None
        if not is_bias and other.layout.shape != value.layout.shape:
            return None
        if not other.layout.is_contiguous() or other.layout.dtype != torch.float32:
            return None
        number = self._operations.index(operation)
        if any(later.writes is other.storage for later in self._operations[number:]):
            return None
        operation.words[place] = other.place
        return value

    # Products and norms.

    def _product(self, node: Any) -> Value:
        """Lower a product of `selfspec.kernels.native`."""
        of_states, of_weight, of_parts, number, setting, _, *of_held = node.args
        if number == FLOAT64:
            raise RecordingError("programs compute in float32")
        weight, parts = self._of_packed(of_weight, of_parts)
        named = zip(("factors", "bias"), of_held, strict=True)
        held = {name: self._value(each) for name, each in named if each is not None}
        return self._multiplied(self._value(of_states), weight, number, held, parts, setting)

    def _of_packed(self, of_weight: Any, of_parts: Any) -> tuple[Value, list[Place]]:
        """Return the first part of a packed weight, and where the others are: each is read as it lies."""
        weight, *parts = (None if each is None else self._value(each) for each in (of_weight, *of_parts))
        assert weight is not None
        if not all(each is None or each.layout.is_contiguous() for each in (weight, *parts)):
            raise RecordingError("programs read weights row by row")
        return weight, [NOWHERE if each is None else each.place for each in parts]

    def _product_of_columns(self, node: Any) -> Value:
        *bias, states, weight = map(self._value, node.args)
        if node.kwargs or weight.layout.dtype not in IN_FLOAT32 or weight.storage.constant is None:
            raise RecordingError(f"programs do not know this {node.target}")
        by_rows = weight.layout.t().is_contiguous()
        if not by_rows and (not weight.layout.is_contiguous() or weight.layout.dtype != torch.float32):
            raise RecordingError("programs read weights in the order of memory, and in 16 bits row by row")
        layout, turned = NUMBERS[weight.layout.dtype] if by_rows else FLOAT_COLUMNS, weight.layout.t()
        return self._multiplied(states, Value(weight.storage, turned), layout, {"bias": bias[0]} if bias else {})

    def _multiplied(
        self,
        of: Value,
        weight: Value,
        layout: int,
        held: Mapping[str, Value],
        parts: Sequence[Place] = (),
        setting: int = 0,
    ) -> Value:
        """Multiply with a weight, `[out, ...]`, that lies as `program.cpp` knows by the number `layout`."""
        states, outputs = self._contiguous(of), weight.layout.shape[0]
        *shape, inputs = states.layout.shape
        result = self._new([*shape, outputs])
        rows = math.prod(shape)
        if rows > MOST_ROWS:
            raise RecordingError("a program multiplies few rows")
        words: list[Word] = [layout, rows, inputs, outputs, setting, states.place, weight.place]
        words += all_parts(parts, NOWHERE)
        places = {name: self._contiguous(each).place for name, each in held.items()}
        self._emit(Kind.PRODUCT, [*words, *(places.get(name, NOWHERE) for name in HELD), result.place], result)
        self._products[id(result.storage)] = self._operations[-1]
        return result

    def _rms_norm(self, node: Any) -> Value:
        states, weight, epsilon, *shift = node.args
        held = None if weight is None else self._value(weight)
        return self._normed(self._value(states), held, None, float(epsilon), float(shift[0]) if shift else 0.0)

    def _layer_norm(self, node: Any) -> Value:
        states, shape, weight, bias, epsilon = node.args
        value = self._value(states)
        if list(shape) != [value.layout.shape[-1]] or weight is None or bias is None:
            raise RecordingError("programs norm the last dimension, with weight and bias")
        return self._normed(value, self._value(weight), self._value(bias), float(epsilon), 0.0)

    def _normed(self, states: Value, weight: Value | None, bias: Value | None, epsilon: float, shift: float) -> Value:
        states = self._contiguous(states)
        result, size = self._new(states.layout.shape), states.layout.shape[-1]
        factors = [NOWHERE if each is None else self._contiguous(each).place for each in (weight, bias)]
        rows = states.layout.numel() // size
        return self._emit(Kind.NORM, [rows, size, epsilon, shift, states.place, *factors, result.place], result)

    # Attention.

    def _rotate(self, node: Any) -> Value:
        *tensors, half = node.args
        states = self._rows(self._value(tensors[0]))
        sizes = states.layout.shape
        result = self._new(sizes)
        words: list[Word] = [*sizes[:3], half]
        for value in (states, *(self._rows(self._value(each)) for each in tensors[1:])):
            layout = value.layout.expand(sizes)
            words += [value.place, *layout.stride()[:3]]
        return self._emit(Kind.ROTATE, [*words, result.place], result)

    def _write(self, node: Any) -> Value:
        buffer, dim, _, states = node.args
        if dim != 2:
            raise RecordingError("programs write slots")
        return self._written(self._value(buffer), self._value(states))

    def _write_by_row(self, node: Any) -> Value:
        buffer, indices, states = node.args[:3]
        if len(indices) != 3 or indices[1] is not None:
            raise RecordingError("programs write slots")
        value = self._value(states)
        return self._written(self._value(buffer), Value(value.storage, value.layout.transpose(1, 2)))

    def _written(self, buffer: Value, states: Value) -> Value:
        if id(buffer.storage) not in self._caches or states.layout.dtype != torch.float32:
            raise RecordingError("programs write the cache alone")
        words: list[Word] = [NUMBERS[buffer.layout.dtype], *states.layout.shape, self._uniform, buffer.place]
        return self._emit(Kind.WRITE, [*words, states.place, *states.layout.stride()], buffer)

    def _attend(self, node: Any) -> Value:
        query, key, value, mask, scale, cap = node.args
        if key in self._source:
            return self._attend_to_source(node)
        queries, keys, values = self._rows(self._value(query)), self._value(key), self._value(value)
        if not {id(keys.storage), id(values.storage)} <= self._caches or keys.layout.storage_offset():
            raise RecordingError("programs attend to the shared cache alone")
        if mask not in self._masks:
            raise RecordingError("programs do not know this mask")
        sight = self._masks[mask]
        if sight.window is not None and self._tree and sight.window.recent < MOST_NODES:
            raise RecordingError("programs take no window that ends within a tree")
        recent, sinks = (0, 0) if sight.window is None else (sight.window.recent, sight.window.sinks)
        how = [False, self._uniform, self._tree, sight.sliding or 0, recent, sinks, float(scale), float(cap)]
        return self._attended(queries, keys, values, how, NOWHERE)

    def _attend_to_source(self, node: Any) -> Value:
        query, key, value, mask, scale, cap = node.args
        if value not in self._source or (mask is not None and mask not in self._source):
            raise RecordingError("programs attend to what an encoder has read as it is")
        seen = NOWHERE if mask is None else self._source[mask].place
        how = [True, *[0] * 5, float(scale), float(cap)]
        queries, keys, values = self._rows(self._value(query)), self._source[key], self._source[value]
        return self._attended(queries, keys, values, how, seen)

    def _attended(self, queries: Value, keys: Value, values: Value, how: Sequence[Word], seen: Place) -> Value:
        batch, heads, tokens, size = queries.layout.shape
        shared, size_of_values = keys.layout.shape[1], values.layout.shape[-1]
        result = self._new([batch, tokens, heads, size_of_values])
        words: list[Word] = [NUMBERS[keys.layout.dtype], batch, heads, shared, tokens, size, size_of_values, *how]
        words += [queries.place, *queries.layout.stride()[:3], keys.place, values.place, result.place, seen]
        return self._emit(Kind.ATTEND, words, result)

    def _chosen_rows(self, node: Any) -> Value:
        table, indices = node.args
        if len(indices) != 1:
            raise RecordingError("programs choose whole rows")
        return self._looked_up(table, indices[0])

    def _rows_of_packed(self, node: Any) -> Value:
        of_ids, of_table, of_parts, number, setting, size, _ = node.args
        table, parts = self._of_packed(of_table, of_parts)
        known = [number, table.layout.shape[0]]
        return self._read_rows(known, size, self._value(of_ids), table.place, parts, setting)

    def _looked_up(self, of_table: Any, of_ids: Any) -> Value:
        of_ids, shift = self._shifted.get(of_ids, (of_ids, 0))
        table, ids = self._value(of_table), self._value(of_ids)
        if not table.layout.is_contiguous():
            raise RecordingError("programs look ids up in tables")
        rows, size = table.layout.shape
        first = Place(table.storage, table.place.offset + shift * size * table.layout.element_size())
        return self._read_rows([NUMBERS[table.layout.dtype], rows - shift], size, ids, first, [])

    def _read_rows(
        self, table: list[Word], size: int, ids: Value, first: Place, parts: Sequence[Place], setting: int = 0
    ) -> Value:
        """Read rows of `size` numbers, by ids, of a table that begins with its dtype and its rows."""
        if not ids.layout.is_contiguous() or ids.layout.dtype != torch.int64:
            raise RecordingError("programs look ids up in tables")
        result = self._new([*ids.layout.shape, size])
        words = [*table, size, ids.layout.numel(), NUMBERS[torch.float32], setting, first, *all_parts(parts, NOWHERE)]
        words += [ids.place, result.place]
        return self._emit(Kind.EMBED, words, result)


# Indices among the words of a product, of which a place is one.
_BIAS, _RESIDUAL = (7 + PARTS + HELD.index(name) for name in ("bias", "residual"))
