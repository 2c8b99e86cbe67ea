"""Substitutes: linear layers and experts of a model in fewer bits, made once, for draft paths that run with them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from selfspec.architecture import Adapter
from selfspec.errors import DraftConfigError
from selfspec.formats.format import Format
from selfspec.formats.packed import Packed, PackedExperts, PackedLinear, PackedStack, PackedWeight
from selfspec.kernels.large_pages import LargePages
from selfspec.model.early_head import plain_head
from selfspec.model.layer_path import LayerPath, sublayers
from selfspec.model.tensor_parallel import LocalPart, local_part
from selfspec.model.view import copied, view_with


class SummedLinear(nn.Module):
    """Runs a linear layer in fewer bits on a part of the inputs, and sums the outputs over processes."""

    bias: Tensor | None

    def __init__(self, linear: PackedLinear, part: LocalPart) -> None:
        super().__init__()
        self.linear, self._group = linear, part.group
        self.register_parameter("bias", None if part.bias is None else nn.Parameter(part.bias.detach(), False))

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on this process, without the bias."""
        return self.linear.nbytes

    def forward(self, states: Tensor) -> Tensor:
        """Multiply this process's part of the states, `[..., in]` to `[..., out]`, and sum over processes."""
        summed: Tensor = self.linear(states).contiguous()
        torch.distributed.all_reduce(summed, group=self._group)
        return summed if self.bias is None else summed + self.bias


Substitute = PackedLinear | PackedExperts | SummedLinear

# Number of values compared in a weight, or in each expert's, to detect changes that torch does not count.
_SAMPLED = 16


@dataclass(frozen=True)
class _Product:
    """Holds weight and bias of a linear layer, `[out, in]` and `[out]`, or of all experts of a mixture."""

    name: str
    weight: Tensor
    bias: Tensor | None

    @property
    def place(self) -> tuple[object, ...]:
        """Memory places and layouts of weight and bias."""
        held = self.weight.layer.parameters() if isinstance(self.weight, PackedWeight) else [self.weight]
        tensors = [*held] if self.bias is None else [*held, self.bias]
        return tuple((each.device, each.data_ptr(), each.dtype, each.shape, each.stride()) for each in tensors)

    @property
    def version(self) -> int:
        """Version of the weight's values: counts changes in place, except those through `weight.data`."""
        return 0 if self.weight.is_inference() else self.weight._version

    @property
    def sample(self) -> Tensor:
        """View of a few values of the weight; empty if it is not in memory."""
        # A packed weight cannot be written to.
        if self.weight.is_meta or isinstance(self.weight, PackedWeight):
            return torch.empty(0)
        diagonal = self.weight.diagonal(dim1=-2, dim2=-1)
        return diagonal[..., :: max(1, diagonal.shape[-1] // _SAMPLED)]

    def fits(self, format: Format) -> bool:
        """Return whether the weight is in memory, and a format fits it."""
        return not self.weight.is_meta and format.takes(self.weight)


@dataclass(frozen=True)
class _Made:
    """Holds a substitute, if any, and places, versions and samples of its weights, which may be replaced and freed.

    `nbytes` is what it takes beside the model.
    """

    substitute: Substitute | None
    nbytes: int
    places: tuple[object, ...]
    versions: tuple[int, ...]
    samples: tuple[Tensor, ...]

    def lies_at(self, products: Sequence[_Product]) -> bool:
        """Return whether it was made from these weights, whatever their values are now."""
        return self.places == tuple(product.place for product in products)

    def may_fit(self, products: Sequence[_Product]) -> bool:
        """Return whether it was made from these weights, and no operation has changed them since."""
        return self.lies_at(products) and self.versions == tuple(product.version for product in products)

    def fits(self, products: Sequence[_Product]) -> bool:
        """Return whether it was made from the present values of these weights."""
        samples = zip(products, self.samples, strict=True)
        return self.may_fit(products) and all(torch.equal(one.sample, other) for one, other in samples)


class Substitutes:
    """Makes and keeps the linear layers and experts of one model in fewer bits. Several threads may use it.

    A substitute is made when first asked for. If its weight changes in place, so does it, where recordings read it; for
    a replaced weight a new one is made. Modules without one run exactly: layers unlike `nn.Linear` and `Conv1D`,
    experts unlike the common kind of `transformers`, quantised weights, and sizes that no kernel takes. `head` names
    the language-model head, if it is plain.
    """

    def __init__(self, head: str | None = None) -> None:
        self._head = head
        self._made: dict[tuple[Format, str], _Made] = {}
        self._lock = threading.Lock()
        self._pages = LargePages()

    @classmethod
    def of(cls, model: PreTrainedModel) -> Substitutes:
        """Return the substitutes of a model; none is made yet."""
        return cls(plain_head(model))

    def __reduce__(self) -> tuple[type[Substitutes], tuple[str | None]]:
        # A copy makes its own substitutes: these belong to the weights in this memory.
        return Substitutes, (self._head,)

    @property
    def nbytes(self) -> int:
        """Bytes that all substitutes take."""
        with self._lock:
            kept = list(self._made.values())
        return sum(made.nbytes for made in kept)

    def take(self, module: nn.Module, name: str, format: Format, weights: Sequence[Tensor], own: Format) -> None:
        """Make a module's substitute from weights that it does not keep, in the order of `substitutable_weights`.

        For paths in `format`; made in `own`.
        """
        transposed = kind_of(module).transposed
        laid_out = [weight.transpose(-1, -2) if transposed else weight for weight in weights]
        with self._lock:
            self._keep(module, name, format, [self._packed(name, weight, own) for weight in laid_out], own)

    def unchanged(self, parts: Iterable[tuple[nn.Module, str]], format: Format) -> Collection[str]:
        """Return the names of those of parts, with names in the model, whose substitutes fit the weights as they are.

        All are compared at once: each comparison waits for the device. If one does not fit, the rest are left out too.
        """
        names: dict[torch.device, list[str]] = defaultdict(list)
        samples: dict[torch.device, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, module in ((name, each) for part, of in parts for name, each in part.named_modules(prefix=of)):
            with self._lock:
                made = self._made.get((format, name))
            products = _products(module)
            if made is not None and products and made.may_fit(products):
                device = made.samples[0].device
                names[device].append(name)
                # Samples of experts have a dimension more.
                found = (product.sample.flatten() for product in products)
                samples[device] += zip(found, map(Tensor.flatten, made.samples), strict=True)
        same = (torch.equal(*map(torch.cat, zip(*samples[device], strict=True))) for device in names)
        return {name for fits, of in zip(same, names.values(), strict=True) if fits for name in of}

    def within(
        self, module: nn.Module, name: str, format: Format, unchanged: Collection[str] = frozenset()
    ) -> nn.Module:
        """Return a view of a part, `name` in the model, with substitutes for its layers; itself if it has none."""
        substitute = self._made_for(module, name, format, lambda weight: self._packed(name, weight, format), unchanged)
        if substitute is not None:
            return substitute
        children = {
            child_name: self.within(child, f"{name}.{child_name}", format, unchanged)
            for child_name, child in module._modules.items()
            if child is not None
        }
        others = {child: new for child, new in children.items() if new is not module._modules[child]}
        return view_with(module, others) if others else module

    def of_rows(self, head: nn.Module, format: Format, rows: Tensor) -> Substitute | None:
        """Make a substitute of the head with the outputs `rows`, `[kept]`; None: it has none, or has a bias."""
        if self._head is None or any(product.bias is not None for product in _products(head)):
            return None
        name = f"{self._head}, outputs {blake2b(rows.numpy(force=True).tobytes()).hexdigest()}"
        return self._made_for(head, name, format, lambda weight: format.pack_head(weight[rows.to(weight.device)]))

    def _made_for(
        self,
        module: nn.Module,
        name: str,
        format: Format,
        packed: Callable[[Tensor], Packed],
        unchanged: Collection[str] = frozenset(),
    ) -> Substitute | None:
        """Return the substitute of a name for the weights as they are now; make it if needed."""
        products = _products(module)
        with self._lock:
            made = self._made.get((format, name))
            if made is None or not (name in unchanged or made.fits(products)):
                if not products or not all(product.fits(format) for product in products):
                    return None
                made = self._keep(module, name, format, [packed(product.weight) for product in products])
        return made.substitute

    def _packed(self, name: str, weight: Tensor, format: Format) -> Packed:
        return format.pack_head(weight) if name == self._head else format.pack(weight)

    def _keep(
        self, module: nn.Module, name: str, format: Format, packed: Sequence[Packed], own: Format | None = None
    ) -> _Made:
        """Make the substitute of a module from its weights, packed in its `own` format, and keep it."""
        products, before, own = _products(module), self._made.get((format, name)), own or format
        substitute = _made(module, products, packed, own)
        if before is not None and before.lies_at(products):
            substitute = _renewed(before.substitute, substitute)
        elif substitute is not None and own.copies:
            for place, weight in substitute.named_parameters():
                # A bias is the layer's own.
                if not place.endswith("bias"):
                    weight.data = self._pages.moved(weight.data)
        made = self._made[format, name] = _Made(
            substitute,
            0 if substitute is None or not own.copies else substitute.nbytes,
            tuple(product.place for product in products),
            tuple(product.version for product in products),
            tuple(product.sample.detach().clone() for product in products),
        )
        return made


def substituted_weights(module: nn.Module, format: Format) -> Iterator[Tensor]:
    """Yield the weights of a part of a model that have substitutes, as far as is known without making them."""
    products = _products(module)
    if products and all(product.fits(format) for product in products):
        yield from (product.weight for product in products)
    for child in module.children():
        yield from substituted_weights(child, format)


def substitutable_weights(model: PreTrainedModel, adapter: Adapter) -> dict[str, dict[str, torch.Size]]:
    """Return sizes of weights that may have substitutes, `[..., out, in]`, by module and weight, in running order."""
    found: dict[str, dict[str, torch.Size]] = {}
    depth = len(adapter.decoder_layers(model))
    whole = LayerPath(depth, substituted=frozenset(sublayers(depth)), head_substituted=True)
    for name, product in _of_path(model, adapter, whole):
        module, _, weight = name.rpartition(".")
        found.setdefault(module, {})[weight] = product.weight.shape
    return found


def _of_path(model: PreTrainedModel, adapter: Adapter, path: LayerPath) -> Iterator[tuple[str, _Product]]:
    """Yield the products that a path runs in fewer bits, with the parameters' names."""
    layers, prefix = adapter.decoder_layers(model), ".".join(adapter.path(model))
    parts = [
        (f"{prefix}.{sublayer.layer}.{name}", layers[sublayer.layer].get_submodule(name))
        for sublayer in sorted(path.substituted)
        for name in adapter.modules_of(layers[sublayer.layer], sublayer.part)
    ]
    head = plain_head(model) if path.head_substituted else None
    if head is not None:
        parts.append((head, model.get_submodule(head)))
    for part, module in parts:
        for name, child in module.named_modules(prefix=part):
            yield from ((f"{name}.{product.name}", product) for product in _products(child))


def no_substitutes(model: nn.Module, format: Format) -> DraftConfigError:
    """Return the error for a model none of whose layers has substitutes."""
    if not format.copies:
        return DraftConfigError(f"{type(model).__name__} has no weights {format.sizes}; draft with int8, or load it so")
    usual = ", ".join(f"{each.name}={each.default}" for each in fields(format))
    return DraftConfigError(
        f"no layer of {type(model).__name__} can run in {format.bits} bits here: there are kernels for plain linear "
        f"layers {format.sizes}; draft with PromptLookup() or an exit" + (f", or with {usual}" if usual else "")
    )


@dataclass(frozen=True)
class WeightKind:
    """Says how a kind of module keeps weights: names of weights and biases, and whether they lie as `[in, out]`."""

    names: tuple[tuple[str, str], ...] = ()
    transposed: bool = False


def kind_of(module: nn.Module) -> WeightKind:
    """Return how a module keeps its replaceable weights; without names: it has none."""
    if type(module) is Conv1D or _is_linear(module):
        return WeightKind((("weight", "bias"),), type(module) is Conv1D)
    # `use_experts_implementation` of transformers sets this on modules that keep all experts in one weight.
    if vars(module).get("_is_expert_parallel") is False and not module.has_post_expert_norm:
        up = "gate_up_proj" if module.has_gate else "up_proj"
        return WeightKind(((up, f"{up}_bias"), ("down_proj", "down_proj_bias")), bool(module.is_transposed))
    return WeightKind()


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is an `nn.Linear`, or of a model's own class that computes the same."""
    if type(module) is nn.Linear:
        return True
    kind: Any = type(module)
    return isinstance(module, nn.Linear) and "forward" not in vars(module) and _multiplies(kind)


@cache
@torch.inference_mode(False)
@torch.no_grad()
def _multiplies(kind: Any) -> bool:
    """Return whether a linear class's `forward` multiplies by the weight, adds the bias and reads nothing else."""
    states, weight, bias = (torch.linspace(-1, 2, size, dtype=torch.float64).sin() for size in (10, 15, 3))
    states, weight = states.view(1, 2, 5), weight.view(3, 5)
    for added in (None, bias):
        layer = kind.__new__(kind)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = 5, 3
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.register_parameter("bias", None if added is None else nn.Parameter(added, requires_grad=False))
        try:
            found = layer(states)
        # It reads something else, which is missing here.
        except Exception:
            return False
        wanted = nn.functional.linear(states, weight, added)
        if type(found) is not Tensor or found.shape != wanted.shape or not torch.allclose(found, wanted):
            return False
    return True


def _products(module: nn.Module) -> tuple[_Product, ...]:
    """Return the replaceable products of a module: one of a linear layer, two of experts, none of other modules."""
    part = local_part(module)
    if part is not None:
        return (_Product("weight", part.weight, part.bias),)
    kind, found = kind_of(module), []
    for name, bias in kind.names:
        weight: Any = getattr(module, name, None)
        if type(weight) not in (nn.Parameter, PackedWeight) or not weight.dtype.is_floating_point:
            return ()
        laid_out = weight.transpose(-1, -2) if kind.transposed else weight
        found.append(_Product(name, laid_out, getattr(module, bias, None)))
    return tuple(found)


# Make ordinary tensors in any mode, since they may be written to later.
@torch.inference_mode(False)
@torch.no_grad()
def _made(
    module: nn.Module, products: Sequence[_Product], packed: Sequence[Packed], format: Format
) -> Substitute | None:
    try:
        part = local_part(module)
        if part is not None and part.split == "in":
            return SummedLinear(_linear(format, packed[0], None, part.weight), part)
        if len(products) == 1:
            return _linear(format, packed[0], products[0].bias, products[0].weight)
        up, down = (_by_expert(format, weight, product) for weight, product in zip(packed, products, strict=True))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # Kernels raise for sizes and devices that they do not take.
        return None
    return _experts(module, up, down)


def _experts(module: nn.Module, up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> PackedExperts:
    # The function between the products may be a method of the module; drop the weights of its copy.
    experts: Any = copied(module)
    experts.__dict__["_parameters"] = {}
    return PackedExperts(up, experts._apply_gate if experts.has_gate else experts.act_fn, down)


def experts_over_packed(module: nn.Module) -> PackedExperts | None:
    """Return experts that multiply by the packed weights which a module holds; None: it holds none, or has others."""
    names, linears = kind_of(module).names, []
    for name, bias in names if len(names) == 2 else ():
        weight, biases = getattr(module, name), getattr(module, bias, None)
        if not isinstance(weight, PackedWeight) or not isinstance(weight.layer, PackedStack):
            return None
        numbers = range(weight.shape[0])
        linears.append([weight.layer.expert(each, None if biases is None else biases[each]) for each in numbers])
    return _experts(module, *linears) if linears else None


def _by_expert(format: Format, packed: Packed, product: _Product) -> list[PackedLinear]:
    experts = range(len(product.weight))
    biases = [None if product.bias is None else product.bias[number] for number in experts]
    return [_linear(format, packed.of_expert(number), biases[number], product.weight) for number in experts]


def _linear(format: Format, packed: Packed, bias: Tensor | None, weight: Tensor) -> PackedLinear:
    """Make one product in fewer bits, and try it."""
    linear = format.layer(packed, bias, weight.dtype)
    device = next(iter(packed.parts.values())).device
    linear(torch.zeros(1, weight.shape[-1], dtype=weight.dtype, device=device))
    return linear


@torch.no_grad()
def _renewed(old: Substitute | None, new: Substitute | None) -> Substitute | None:
    """Copy the values of `new` into the memory of `old` and return it; return `new` if one of them is None."""
    if old is None or new is None:
        return new
    for to, values in zip(old.parameters(), new.parameters(), strict=True):
        # Biases are the layer's own.
        if to.data_ptr() != values.data_ptr():
            to.copy_(values)
    return old
