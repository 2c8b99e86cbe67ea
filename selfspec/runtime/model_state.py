"""Check whether passes of a model can be recorded, and note the state that a recording depends on besides its inputs.

Equal inputs must always take the same path through its code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import GeneralInterface

from selfspec.errors import UnsupportedModelError
from selfspec.formats.packed import PackedLinear, PackedWeight
from selfspec.model.decodable import GLOBAL_HOOKS, has_hooks
from selfspec.model.view import copied, has_other_forward, is_streamed
from selfspec.runtime.attention import attends_by_cudnn

# Compare these by value.
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
# Not read by a forward pass without gradients, or written by `transformers` in passing.
_NOT_READ = ("backward", "state_dict", "_non_persistent_buffers_set", "warnings_issued")


class ModelState:
    """Takes a snapshot of everything in a model that a recording may depend on.

    It holds the attributes of modules, among them weights, children, hooks and replaced `forward`s; configurations;
    classes; the functions that their code looks up by name, those of torch too; addresses, strides and offsets of
    weights and buffers; and settings of torch. Values of weights and buffers are left out: recordings read them in
    place.

    The snapshot holds every object, so that no new object can take its address, and compares by identity: about 0.2 ms
    for a dozen layers. `others` are names of functions that it may run and that others wrote, as in `ReachedCode`.
    """

    def __init__(self, model: nn.Module, further: tuple[str, ...] = ()) -> None:
        self.model = model
        code = ReachedCode(model, further)
        self.others = tuple(code.others)
        self._modules = tuple(model.modules())
        self._contents: list[Collection[Any]] = []
        self._weights: list[Tensor] = []
        self._constants: list[Tensor] = []
        self._followed: set[int] = set()
        for module in self._modules:
            for held in (module._parameters, module._buffers):
                self._follow(held, self._weights)
            self._follow(vars(module), self._constants)
        for shared in (*GLOBAL_HOOKS, *code.mappings):
            self._contents.append(shared.values())
        for kind in {base for module in self._modules for base in type(module).__mro__ if base is not object}:
            self._contents.append(vars(kind).values())
        # Twice, since one name alone would give no tuple.
        self._names = [(itemgetter(*names, *names), space) for space, names in code.names.values()]
        # Most are hooks that nobody has set.
        self._empty = [each for each in self._contents if not each]
        self._contents = [each for each in self._contents if each]
        self._strided = [each for each in (*self._weights, *self._constants) if each.layout is torch.strided]
        # These have no address.
        self._others = [each for each in (*self._weights, *self._constants) if each.layout is not torch.strided]
        self._objects = self._found()
        self._layouts = self._laid_out()
        self._settings = _settings()

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        if any(self._empty):
            return False
        try:
            found = self._found()
        except KeyError:
            return False
        if len(found) != len(self._objects):
            return False
        if not all(map(is_, found, self._objects)) and not all(map(_is_same, found, self._objects)):
            return False
        return self._layouts == self._laid_out() and self._settings == _settings()

    def _follow(self, value: Any, tensors: list[Tensor]) -> None:
        """Note the entries of a container, and of containers and tensors in it."""
        if isinstance(value, Tensor):
            tensors.append(value)
        if isinstance(value, PreTrainedConfig):
            value = vars(value)
        if not isinstance(value, (dict, list, set, tuple)) or id(value) in self._followed:
            return
        self._followed.add(id(value))
        self._contents.append(value.values() if isinstance(value, dict) else value)
        # A copy: another thread may add an attribute meanwhile.
        for name, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if not any(part in str(name) for part in _NOT_READ):
                self._follow(each, tensors)

    def _found(self) -> tuple[Any, ...]:
        """Return all noted objects in one tuple."""
        return (
            *chain.from_iterable(self._contents),
            *chain.from_iterable(names(space) for names, space in self._names),
            *map(type, self._modules),
        )

    def _laid_out(self) -> list[object]:
        """Return addresses, strides and offsets of its tensors."""
        # The values of other tensors may be part of a recording.
        versions = [None if each.is_inference() else each._version for each in self._constants]
        # Tensor by tensor: what is read of one lies close together, and has mostly left the caches.
        places = [(each.data_ptr(), each.stride(), *_FORM(each)) for each in self._strided]
        return [*places, *map(_FORM, self._others), *versions]


_FORM = attrgetter("dtype", "shape", "device")


def _is_same(found: Any, known: Any) -> bool:
    return found is known or (type(found) is type(known) and isinstance(found, _PLAIN) and bool(found == known))


def _settings() -> tuple[object, ...]:
    """Return the process-wide settings by which torch chooses kernels and dtypes."""
    cuda, mkldnn, cudnn = torch.backends.cuda, torch.backends.mkldnn, torch.backends.cudnn
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        # Passes themselves turn cuDNN's off and on again.
        (attends_by_cudnn(), cuda.fp16_bf16_reduction_math_sdp_allowed()),
        (mkldnn.enabled, mkldnn.deterministic, mkldnn.matmul.fp32_precision),  # type: ignore[attr-defined]
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        torch.backends.fp32_precision,  # type: ignore[attr-defined]
        (cuda.matmul.fp32_precision, cuda.preferred_blas_library()),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
    )


QUANTISERS = ("aqlm.", "auto_gptq.", "awq.", "bitsandbytes.", "compressed_tensors.", "eetq.", "gptqmodel.", "hqq.")
"""Packages of quantised layers, for captures: what these do not repeat fails its comparison, and is refused."""

# Modules and functions of these are known to decide alike in every call.
_KNOWN = ("torch.", "numpy.", "transformers.", "selfspec.")
# Follow only these of torch: its other functions call kernels.
_LOOKED_INTO = ("torch.nn.", "transformers.")
# The kernels of attention that selfspec runs, and of masks for them.
_KERNELS = {"sdpa", "eager"}


class ReachedCode:
    """Finds the code that can be reached from the `forward` of some modules, without running it.

    Names are followed wherever code mentions them: in its module, in modules found there, and among the methods of its
    class. It may name more than a pass runs, but misses nothing that is called by name.
    """

    def __init__(self, model: nn.Module, further: tuple[str, ...] = ()) -> None:
        self._known = _KNOWN + further
        # By id of a namespace: the namespace, and the names looked up in it.
        self.names: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self.mappings: list[dict[Any, Any]] = []  # kernels by name, from which a configuration chooses
        self.others: list[str] = []  # names of functions from outside Python, `torch`, NumPy and `transformers`
        self._seen: set[object] = set()
        self._left: list[tuple[FunctionType, type | None]] = []
        for module in model.modules():
            kind = type(module)
            self._add(kind.__call__, kind)
            self._add(kind.forward, kind)
            for value in list(vars(module).values()):
                if callable(value) and not isinstance(value, type):
                    self._add(value, kind)
        while self._left:
            self._follow(*self._left.pop())

    def _add(self, value: Any, kind: type | None) -> None:
        """Queue a callable to be followed."""
        while isinstance(value, (MethodType, partial)):
            value = value.__func__ if isinstance(value, MethodType) else value.func
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, FunctionType):
            # A wrapper reports the module of what it wraps.
            home = str(value.__globals__.get("__name__"))
        else:
            home = str(getattr(value, "__module__", None) or type(value).__module__)
        if not f"{home}.".startswith(self._known) and home.split(".")[0] not in sys.stdlib_module_names:
            self.others.append(f"{home}.{getattr(value, '__qualname__', type(value).__qualname__)}")
            return
        looked_into = isinstance(value, FunctionType) and f"{home}.".startswith(_LOOKED_INTO)
        # The names that a method finds depend on the class it is called on.
        if looked_into and (value, kind) not in self._seen:
            self._seen.add((value, kind))
            self._left.append((value, kind))

    def _follow(self, function: FunctionType, kind: type | None) -> None:
        mentioned = {name for code in _codes(function.__code__) for name in code.co_names}
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # Not filled yet.
                self._found(cell.cell_contents, kind)
        spaces = [function.__globals__]
        for space in spaces:
            for name in mentioned & space.keys():
                value = space[name]
                self.names.setdefault(id(space), (space, set()))[1].add(name)
                if isinstance(value, ModuleType):
                    inner = vars(value)
                    if not any(inner is known for known in spaces):
                        spaces.append(inner)
                else:
                    self._found(value, None)
        for base in kind.__mro__ if kind else ():
            for name in mentioned & vars(base).keys():
                self._found(vars(base)[name], kind)

    def _found(self, value: Any, kind: type | None) -> None:
        if isinstance(value, GeneralInterface):
            mappings = (vars(value)["_local_mapping"], type(value)._global_mapping)
            for mapping in mappings:
                if not any(mapping is known for known in self.mappings):
                    self.mappings.append(mapping)
            for name in _KERNELS & set(value):
                self._add(value[name], None)
        elif isinstance(value, (FunctionType, MethodType, partial, property, staticmethod, classmethod)):
            self._add(value, kind)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


# Modules of these are known to decide alike in every call.
_RECORDABLE = ("torch.nn.", "transformers.", "selfspec.")


def why_not(model: nn.Module, further: tuple[str, ...] = ()) -> str | None:
    """Say why this stock model cannot be recorded now; None: it can be, but for passes that stream weights."""
    if any(GLOBAL_HOOKS):
        return "every module of this process has hooks"
    for name, module in model.named_modules():
        kind = type(module)
        if is_streamed(module):
            continue
        if not f"{kind.__module__}.".startswith(_RECORDABLE + further):
            return (
                f"{name or 'the model'} is a {kind.__module__}.{kind.__qualname__}, which may act differently next time"
            )
        if has_other_forward(module):
            return f"the forward of {name or 'the model'} was replaced"
        if has_hooks(module):
            return f"{name or 'the model'} has hooks"
    known = {
        id(weight)
        for module in model.modules()
        if is_streamed(module) or isinstance(module, PackedLinear) or f"{type(module).__module__}.".startswith(further)
        for weight in module.parameters()
    }
    for name, weight in model.named_parameters():
        if id(weight) in known:
            continue
        if type(weight) not in (nn.Parameter, PackedWeight) or weight.is_meta or not weight.dtype.is_floating_point:
            return f"{name} is quantised or offloaded"
    return None


def is_watched(device: torch.device) -> bool:
    """Return whether a torch mode or autocast, which sees or changes every operation, is active for a device."""
    return (
        _get_current_dispatch_mode() is not None
        # A default device is such a mode too.
        or any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
        or torch.is_autocast_enabled(device.type)
    )


def frozen_view(module: nn.Module) -> nn.Module:
    """Make a view whose weights, in the same memory, need no gradient: others cannot be part of a recording.

    It has its own holders of weights and buffers, so other tensors can be swapped in.
    """
    view = copied(module)
    view.__dict__["_buffers"] = dict(module._buffers)
    view.__dict__["_parameters"] = {
        name: None if weight is None else nn.Parameter(weight.detach(), requires_grad=False)
        for name, weight in module._parameters.items()
    }
    view.__dict__["_modules"] = {
        name: None if child is None else frozen_view(child) for name, child in module._modules.items()
    }
    if isinstance(module, PreTrainedModel):
        # It would search for padding in every pass without a mask.
        view.__dict__["warn_if_padding_and_no_attention_mask"] = lambda *_: None
    return view


def run_watched(function: Callable[[], Any]) -> Any:
    """Run a pass once; raise UnsupportedModelError if a decision in it depends on values of tensors."""
    with _NoReading(), _NoTaking():  # type: ignore[no-untyped-call]
        return function()


class _NoTaking(TorchFunctionMode):
    """Refuses to pass values of tensors to Python or NumPy, which no torch operation shows."""

    _TAKING = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._TAKING:
            raise UnsupportedModelError(f"a pass of this model depends on values of tensors: {func.__name__} reads one")
        return func(*args, **(kwargs or {}))


class _NoReading(TorchDispatchMode):
    """Refuses to turn values of tensors into numbers or shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor | Any:
        if reads_values(func, args):
            raise UnsupportedModelError(f"a pass of this model depends on values of tensors: {func} reads one")
        return func(*args, **(kwargs or {}))


def reads_values(func: Any, args: Any) -> bool:
    """Return whether a torch operation turns values of tensors into numbers or shapes, which waits for the device."""
    if func is torch.ops.aten.index.Tensor:
        # The values of a mask decide the shape of the result.
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
