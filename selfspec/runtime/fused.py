"""Join the operations of a captured pass to few launches: patterns of them, in any architecture, are one kernel each.

A layer of most models takes nine: products of the same states side by side, or one gating the other; rotary positions,
with norms of heads before, and the write to the cache; attention, in two; a residual sum with the norms around it; and
two products that torch computes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from selfspec.kernels.triton_attention import MOST_TOKENS, block_attention
from selfspec.kernels.triton_norms import added_norm, rms_norm
from selfspec.kernels.triton_planes import joint_in_planes
from selfspec.kernels.triton_products import joint_product
from selfspec.kernels.triton_rotary import rotated_to_cache
from selfspec.runtime import noting
from selfspec.runtime.noting import Noted, aten, is_call, mask_tensors, noted_pass
from selfspec.runtime.pass_function import PassFunction

# Rows of a product beyond which torch's takes less time.
_MOST_ROWS = 64


class FusedPass:
    """Runs a pass as `function` does, up to rounding, in fewer launches; its view asks for grouped attention."""

    def __init__(self, function: PassFunction) -> None:
        self._function = function
        self._sizes: object = None
        self._module = GraphModule({}, Graph())

    @torch.no_grad()
    def __call__(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        masks = self._function.masks(tensors)
        sizes = [tensor.shape for tensor in tensors]
        if sizes != self._sizes:
            self._module = fused(noted_pass(self._function, tensors, masks), tensors[0].device)
            self._sizes = sizes
        found: tuple[Tensor, ...] = self._module(*tensors, *mask_tensors(masks).values())
        return found


def fused(noted: Noted, device: torch.device) -> GraphModule:
    """Return a noted pass, which is rewritten, as a module in few launches on a device."""
    graph = noted.graph
    noting.joined(graph)
    start = next(iter(graph.nodes))
    for node in list(graph.nodes):
        if node.op == "get_attr":
            # All come first, so that a launch may be where the first is that it replaces.
            start.prepend(node)
        elif is_call(node, aten.alias.default) or is_call(node, aten.detach.default):
            node.replace_all_uses_with(node.args[0])
        elif "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    for join in (_gate, _multiply_side_by_side, _add_and_normalize, _attend, _launch_alone):
        join(graph)
        graph.eliminate_dead_code()
    return GraphModule(dict(noted.held), graph)


def _calls(graph: Graph, *targets: Any) -> Iterator[Any]:
    for node in list(graph.nodes):
        if any(is_call(node, target) for target in targets):
            yield node


def _put(graph: Graph, before: Node, target: Any, args: tuple[Any, ...], like: Node | None = None) -> Any:
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    if like is not None:
        node.meta = like.meta
    return node


# Products.


@dataclass(frozen=True)
class _Product:
    node: Node  # gives [rows, outputs]
    states: Node  # [rows, inputs]
    weight: Node
    held: tuple[Node, ...] = ()  # factors and scales of a weight in few bits, other parts of one in planes
    bias: Node | None = None

    @property
    def in_planes(self) -> bool:
        return is_call(self.node, torch.ops.selfspec.few_rows_in_planes_by_triton.default)

    @property
    def kind(self) -> object:
        """Says what products in one launch have in common: the same states among others."""
        states, alike = self.states, (self.weight,) if self.in_planes else (self.weight, *self.held)
        source = states.args[0] if is_call(states, aten.view.default) else states
        layouts = [(each.meta["val"].dtype, each.meta["val"].shape[1:]) for each in alike]
        return source, states.meta["val"].shape, *layouts, len(self.held), self.bias is None

    @classmethod
    def of(cls, node: Any) -> _Product | None:
        """Return a node as a product that a launch may share; None: it is none."""
        if is_call(node, torch.ops.selfspec.few_rows_by_triton.default):
            states, factors, levels, scales = node.args
            return cls(node, states, levels, (factors, scales))
        if is_call(node, torch.ops.selfspec.few_rows_in_planes_by_triton.default):
            states, upper, *held = node.args
            return cls(node, states, upper, tuple(held))
        if (not is_call(node, aten.mm.default) and not is_call(node, aten.addmm.default)) or node.kwargs:
            return None
        *bias, states, turned = node.args
        weight: Any = turned.args[0] if is_call(turned, aten.t.default) else None
        held = [weight, *bias]
        if not all(isinstance(each, Node) and each.op == "get_attr" for each in held):
            return None
        form, rows = weight.meta["val"], states.meta["val"]
        alike = all(each.meta["val"].dtype == rows.dtype for each in held)
        fits = form.is_contiguous() and form.shape[1] % 16 == 0 and len(rows) <= _MOST_ROWS
        return cls(node, states, weight, bias=bias[0] if bias else None) if alike and fits else None


def _multiply(graph: Graph, before: Node, products: list[_Product], gate: str | None = None) -> Any:
    states = products[0].states
    if products[0].in_planes:
        return _put(graph, before, joint_in_planes, (states, [(each.weight, *each.held) for each in products], gate))
    weights, biases = [each.weight for each in products], [each.bias for each in products if each.bias is not None]
    factors, scales = ([each.held[part] for each in products if each.held] for part in range(2))
    return _put(graph, before, joint_product, (states, weights, factors, scales, biases, gate))


def _gate(graph: Graph) -> None:
    """Join two products of the same states, one of which gates the other."""
    for node in _calls(graph, noting.gated):
        name, *given = node.args
        sources = [each.args[0] if _is_view(each) and len(each.users) == 1 else each for each in given]
        products = [each for each in map(_Product.of, sources) if each is not None and each.bias is None]
        if len(products) == 2 and len({each.kind for each in products}) == 1:
            joint = _multiply(graph, node, products, str(name))
            node.replace_all_uses_with(_put(graph, node, aten.view.default, (joint, [*node.meta["val"].shape]), node))


def _is_view(node: Any) -> bool:
    return is_call(node, aten.view.default) or is_call(node, aten._unsafe_view.default)


def _multiply_side_by_side(graph: Graph) -> None:
    """Join products of the same states."""
    alike: dict[object, list[_Product]] = {}
    for product in map(_Product.of, graph.nodes):
        if product is not None:
            alike.setdefault(product.kind, []).append(product)
    for products in alike.values():
        if len(products) > 1:
            first, start = products[0].node, 0
            joint = _multiply(graph, first, products)
            for each in products:
                end = start + each.node.meta["val"].shape[1]
                part = _put(graph, first, aten.slice.Tensor, (joint, 1, start, end), each.node)
                each.node.replace_all_uses_with(part)
                start = end


# Norms.


def _add_and_normalize(graph: Graph) -> None:
    """Join the sum of two states with its norm, and with the norm of what is added."""
    for node in _calls(graph, noting.rms_norm):
        added, weight, epsilon, shift = node.args
        if not is_call(added, aten.add.Tensor) or added.kwargs or not _is_launched(node):
            continue
        residual, states = added.args
        if is_call(residual, noting.rms_norm):
            residual, states = states, residual
        forms = [each.meta["val"] if isinstance(each, Node) else None for each in (added, residual, states)]
        if None in forms or len({(each.shape, each.dtype) for each in forms if each is not None}) > 1:
            continue
        before = None
        if is_call(states, noting.rms_norm) and len(states.users) == 1 and _is_launched(states):
            states, *before = states.args
        args = (states, residual, weight, epsilon, shift, None if before is None else tuple(before))
        joint = _put(graph, added, added_norm, args)
        for place, each in enumerate((added, node)):
            each.replace_all_uses_with(_put(graph, added, operator.getitem, (joint, place), each))


def _is_launched(node: Any) -> bool:
    """Return whether a kernel computes a norm: all that it reads and gives has one dtype."""
    states, weight, *_ = node.args
    dtypes = {each.meta["val"].dtype for each in (states, weight, node) if isinstance(each, Node)}
    return weight is not None and len(dtypes) == 1


# Attention.


def _attend(graph: Graph) -> None:
    """Join the rotation of queries and keys with the norms of their heads and the write to the cache."""
    for node in _calls(graph, torch.ops.selfspec.attend.default):
        queries, *read = node.args[:3]
        writes = [each.args[0] if is_call(each, aten.slice.Tensor) and len(each.users) == 1 else each for each in read]
        placed: list[Any] = [_written(each) for each in writes]
        if not is_call(queries, noting.rotate) or placed[0] is None or placed[1] is None:
            continue
        (buffer, keys, slots), (of_values, values, _) = placed
        turns = queries.args[1:]
        if not is_call(keys, noting.rotate) or keys.args[1:] != turns or len(keys.users) > 1 or len(queries.users) > 1:
            continue
        if keys.args[0].meta["val"].shape != values.meta["val"].shape:
            continue
        heads, how = [queries.args[0], keys.args[0]], tuple[Any, ...]()
        norms = [_norm_of_heads(each) for each in heads]
        if norms[0] is not None and norms[1] is not None and norms[0].args[2:] == norms[1].args[2:]:
            for place, norm in enumerate(norms):
                turned = heads[place] is not norm
                heads[place] = _put(graph, node, aten.transpose.int, (norm.args[0], 1, 2)) if turned else norm.args[0]
            how = (tuple(norm.args[1] for norm in norms), *norms[0].args[2:])
        args = (*heads, values, *turns[:2], (buffer, of_values), slots, *how)
        given = [_put(graph, node, _rotated_to_cache, args)]
        for each, write, held in zip(read, writes, (buffer, of_values), strict=True):
            given.append(held if each is write else _put(graph, node, aten.slice.Tensor, (held, *each.args[1:])))
        node.args = (*given, *node.args[3:])
        for each in dict.fromkeys([*read, *writes]):
            graph.erase_node(each)


def _norm_of_heads(heads: Any) -> Any:
    """Return the norm that gives heads, `[batch, heads, tokens, width]`, or gave them before they were turned."""
    norm = heads.args[0] if is_call(heads, aten.transpose.int) and heads.args[1:] == (1, 2) else heads
    return norm if is_call(norm, noting.rms_norm) and len(norm.users) == 1 and _is_launched(norm) else None


def _written(node: Any) -> tuple[Any, Any, Any] | None:
    """Return the buffer, the states and the slots that a node writes, `[batch, heads, tokens, width]`."""
    if is_call(node, aten.index_copy_.default) and node.args[1] == 2 and len(node.users) == 1:
        buffer, _, slots, states = node.args
    elif is_call(node, aten.index_put_.default) and len(node.args) == 3 and len(node.users) <= 1:
        buffer, (_, heads, slots), states = node.args[0], (*node.args[1], None, None)[:3], node.args[2]
        if heads is not None or not is_call(states, aten.transpose.int):
            return None
        states = states.args[0]
    else:
        return None
    return buffer, noting.before_change(states), slots


def _rotated_to_cache(
    queries: Tensor, keys: Tensor, values: Tensor, cosines: Tensor, sines: Tensor, *others: Any
) -> Tensor:
    return rotated_to_cache(queries, keys, values, cosines[:, 0].contiguous(), sines[:, 0].contiguous(), *others)


# What stands alone.


def _launch_alone(graph: Graph) -> None:
    for node in _calls(graph, noting.rms_norm):
        target = rms_norm if _is_launched(node) else _norm_by_torch
        args = node.args if _is_launched(node) else (*node.args, node.meta["val"].dtype)
        node.replace_all_uses_with(_put(graph, node, target, args, node))
    launched: dict[Any, Any] = {
        noting.rotate: _rotate,
        noting.gated: _gated,
        torch.ops.selfspec.attend.default: _attended,
    }
    for node in _calls(graph, *launched):
        node.target = launched[node.target]


def _norm_by_torch(states: Tensor, weight: Tensor | None, epsilon: float, shift: float, dtype: torch.dtype) -> Tensor:
    wide = states.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (normed if weight is None else normed * (weight.float() + shift)).to(dtype)


def _rotate(states: Tensor, cosines: Tensor, sines: Tensor, half: int) -> Tensor:
    turned = torch.cat((-states[..., half:], states[..., :half]), -1)
    return states * cosines + turned * sines


def _gated(name: str, states: Tensor, factor: Tensor) -> Tensor:
    if name == "silu":
        return functional.silu(states) * factor
    return functional.gelu(states, approximate="tanh" if name == "gelu_by_tanh" else "none") * factor


def _attended(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, _: float) -> Tensor:
    if mask is not None and queries.shape[2] <= MOST_TOKENS:
        return block_attention(queries, keys, values, mask, scale)
    found = functional.scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True)
    return found.transpose(1, 2).contiguous()
