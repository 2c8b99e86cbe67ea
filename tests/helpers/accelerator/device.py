"""A stand-in for an accelerator, on a CPU: torch's device `standin`.

What makes a device hard to use is true of it too. Its tensors do not mix with the host's, but for numbers where CUDA
takes them. Whoever reads a value waits, and waits are counted, with who waited; so are operations that are launched,
and bytes that are copied. What is copied without waiting comes late, and until then nonsense lies where it goes. Fresh
memory holds nonsense, too. Memory is counted, and can run out at any allocation. A capture refuses what a graph cannot
repeat.

Operations run at once, by the CPU's kernels on the same bytes: what is late are copies alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial, partialmethod
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from helpers.accelerator.streams import (
    SIZES_ONLY,
    Capture,
    Event,
    Graph,
    Late,
    Memory,
    Pool,
    Stream,
    Streams,
    device_tensor,
    memory_of,
    repointed,
    spoil,
)
from selfspec.accept.tree_paths import tree_tables
from selfspec.draft.tree_growth import growth_of

NAME = "standin"
_ATEN = torch.ops.aten
# Where CUDA takes a number of the host's, besides in operations on each element.
_TAKE_NUMBERS = ("aten::masked_fill_", "aten::fill_", "aten::where", "aten::_index_put_impl_")
_READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_VIEWS = ("as_strided", "view", "_reshape_alias", "unfold", "set_.source_Storage_storage_offset", "set_.source_Tensor")
_PINNING = ("tensor", "zeros", "ones", "empty")


@dataclass
class Counts:
    """What was asked of the device: waits, operations, bytes copied; of each wait what waited, and for which line."""

    waits: int = 0
    launches: int = 0
    to_device: int = 0
    to_host: int = 0
    allocations: int = 0
    waited: list[str] = field(default_factory=list)


class Accelerator:
    """One device, on which allocation `fails_at`, counted from 1 in `counts`, finds no memory."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.allocated = self.peak = 0
        self.capacity = 2**40
        self.fails_at: int | None = None
        self.streams = Streams(Stream(self))
        self.live: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        self._threads = threading.local()

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    @property
    def capture(self) -> Capture | None:
        return getattr(self._threads, "capture", None)

    @capture.setter
    def capture(self, capture: Capture | None) -> None:
        self._threads.capture = capture

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """Count what happens in a `with` block by itself."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    def host_waits(self, reason: str) -> None:
        """Note that the host waits for what this thread asked for."""
        if self.capture is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {reason}")
        self.counts.waits += 1
        self.counts.waited.append(f"{reason} in {_asked_by()}")
        self.streams.current.reach(host_waits=True)

    def host(self, value: Any) -> Any:
        """Return the host's view of a tensor of the device; anything else as it is."""
        if not isinstance(value, Tensor) or value.device.type != NAME:
            return value
        return memory_of(value).view(value)

    def made(self, like: Tensor) -> Tensor:
        """Return a tensor of the device over the very memory of one of the host, which nobody else has."""
        return device_tensor(self._taken(like.untyped_storage()), like)

    def empty(self, fresh: Tensor) -> Tensor:
        """Return a new tensor that holds nonsense."""
        spoil(fresh.untyped_storage())
        return self.made(fresh)

    def _taken(self, storage: torch.UntypedStorage) -> Memory:
        self.counts.allocations += 1
        size = storage.nbytes()
        if self.counts.allocations == self.fails_at or self.allocated + size > self.capacity:
            raise torch.OutOfMemoryError(f"the stand-in is out of memory: tried to allocate {size} bytes")
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        memory = Memory(storage, self._freed, self.capture and self.capture.pool)
        if self.capture is not None:
            self.capture.pool.memories.add(memory)
        self.live[storage.data_ptr()] = memory
        return memory

    def _freed(self, size: int) -> None:
        self.allocated -= size

    def copy(self, source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
        here, there = self.host(source), self.host(to)
        size = to.numel() * to.element_size()
        if source.device == to.device:
            copied: Tensor = self.launch(_ATEN.copy_.default, to, source)
            return copied
        on_host = source if source.device.type == "cpu" else to
        at_once = not (non_blocking and on_host.is_pinned())
        if self.capture is None:
            self.streams.current.come_to(on_host)
        if to.device.type == "cpu":
            self.counts.to_host += size
        else:
            self.counts.to_device += size
        if at_once:
            self.host_waits("copy")
            there.copy_(here)
        elif self.capture is not None:
            if to.device.type == "cpu":
                raise RuntimeError("operation not permitted when stream is capturing: copy to memory of the host")
            self.capture.note_copy(source, to)
        elif to.device.type == "cpu":
            self.streams.current.add(Late(there, here.to(to.dtype, copy=True), for_host=True))
        elif self.streams.current is self.streams.default:
            there.copy_(here)
            self.streams.current.add(Late(None, here.clone(), source))
        else:
            self.streams.current.add(Late(there, here.clone(), source))
        return to

    def launch(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        operation = _operation(func)
        if operation.moves_indices:
            if any(map(_is_mask, args[1])):
                self.host_waits("nonzero")
            args = (args[0], [None if each is None else each.to(self.device) for each in args[1]], *args[2:])
        if operation.reads_values:
            self.host_waits(operation.name)
        if self.streams.current is not self.streams.default:
            # In a stream one comes after the other.
            self.streams.current.reach(host_waits=False)
        self.counts.launches += 1
        taken: set[int] = set()
        args = operation.with_numbers(args)

        def given(value: Any) -> Any:
            if isinstance(value, Tensor):
                if value.device.type != NAME:
                    operation.check_number(value)
                    return value
                storage = value.untyped_storage()
                taken.add(storage.data_ptr())
                return storage.memory.view(value)  # type: ignore[attr-defined]
            return list(map(given, value)) if isinstance(value, list | tuple) else value

        host_args = list(map(given, args))
        host_kwargs = {name: given(value) for name, value in kwargs.items()}
        if "device" in kwargs:
            host_kwargs["device"] = torch.device("cpu")
        written = operation.written(args, kwargs)
        if self.capture is not None:
            self.capture.keep_for_undoing(written.values())
        found = func(*host_args, **host_kwargs)
        for name, host in operation.written(host_args, host_kwargs).items():
            if written[name].shape != host.shape:
                self._resized(written[name], host)

        def new(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self.made(value.clone() if value.untyped_storage().data_ptr() in taken else value)
            return list(map(new, value)) if isinstance(value, list | tuple) else value

        values = found if len(operation.returned) > 1 else [found]
        outputs = [
            new(value) if name is None else written[name]
            for name, value in zip(operation.returned, values, strict=False)
        ]
        if self.capture is not None:
            self.capture.note(func, args, kwargs, outputs)
        return None if not outputs else outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _resized(self, mine: Tensor, its: Tensor) -> None:
        """Let an output that the CPU's kernel gave another size have it, too."""
        if its.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr():
            repointed(mine, mine.untyped_storage(), its)
        else:
            repointed(mine, self.made(its).untyped_storage(), its)

    def item(self, tensor: Tensor) -> Any:
        self.host_waits("item")
        self.counts.to_host += tensor.element_size()
        return self.host(tensor).item()

    def moved(
        self,
        tensor: Tensor,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        non_blocking: bool = False,
        memory_format: Any = None,
    ) -> Tensor:
        """`_to_copy` of a tensor of the device."""
        to = torch.empty_like(tensor, dtype=dtype, device=device, memory_format=memory_format or torch.preserve_format)
        if to.device.type == "cpu" and non_blocking:
            pinned(to)
        return to.copy_(tensor, non_blocking)


def pinned(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().pinned = True  # type: ignore[attr-defined]
    return tensor


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return getattr(tensor.untyped_storage(), "pinned", False)


class _Operation:
    """What the schema of an operation says; `returned`: of each output the argument that it is, None if it is new."""

    def __init__(self, func: Any) -> None:
        self.name = func.name().partition(".")[0]
        self._pointwise = torch.Tag.pointwise in func.tags or self.name in _TAKE_NUMBERS
        # What `index` needs, places of a mask and indices of the host, torch asked for before.
        self.reads_values = self.name != "aten::index" and bool(_READING & set(func.tags))
        self.moves_indices = self.name == "aten::_index_put_impl_"
        arguments = [(each.name, each.alias_info) for each in func._schema.arguments]
        self._tensors = [str(each.type) == "Tensor" for each in func._schema.arguments]
        self._written = [
            (place, name) for place, (name, alias) in enumerate(arguments) if alias is not None and alias.is_write
        ]
        by_set = {frozenset(alias.before_set): name for name, alias in arguments if alias is not None}
        self.returned: list[str | None] = []
        for each in func._schema.returns:
            alias = each.alias_info
            assert alias is None or alias.is_write, f"{self.name} gives a view, which the stand-in does not know"
            self.returned.append(None if alias is None else by_set[frozenset(alias.before_set)])

    def with_numbers(self, args: Any) -> Any:
        """Return arguments with tensors in the place of Python's numbers where it takes tensors."""
        return [
            torch.tensor(value) if takes and isinstance(value, int | float) else value
            for takes, value in zip(self._tensors, args, strict=False)
        ]

    def check_number(self, tensor: Tensor) -> None:
        """Refuse a tensor of the host that is more than CUDA takes."""
        if self.name != "aten::index" and (tensor.dim() or not self._pointwise):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and "
                f"{tensor.device}! ({self.name})"
            )

    def written(self, args: Any, kwargs: Any) -> dict[str, Tensor]:
        found = {}
        for place, name in self._written:
            value = args[place] if place < len(args) else kwargs.get(name)
            each = value if isinstance(value, list) else [value]
            assert len(each) == 1, f"{self.name} writes to lists, which the stand-in does not know"
            if each[0] is not None:
                found[name] = each[0]
        return found


_operation = cache(_Operation)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _asked_by() -> str:
    """Return the line of selfspec's own that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        _, found, inside = frame.f_code.co_filename.rpartition("/selfspec/")
        if found:
            return f"{inside}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "no line of selfspec's"


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_built(self) -> bool:
        return True

    def is_available(self) -> bool:
        return bool(_present)

    def has_primary_context(self, device_index: int) -> bool:
        return bool(_present)


# The device that is there now; torch registers the kind of it once for a process.
_present: list[Accelerator] = []


def _there() -> Accelerator:
    if not _present:
        raise RuntimeError("the stand-in is not there")
    return _present[0]


# What `torch.cuda` is to CUDA.
_MODULE = SimpleNamespace(
    Graph=lambda: Graph(_present[0]),
    CUDAGraph=lambda: Graph(_present[0]),
    graph_pool_handle=Pool,
    is_available=lambda: bool(_present),
    is_initialized=lambda: bool(_present),
    _is_in_bad_fork=lambda: False,
    current_device=lambda: 0,
    device_count=lambda: len(_present),
    manual_seed_all=lambda seed: None,
    Stream=lambda device=None: Stream(_present[0]),
    Event=lambda enable_timing=False: Event(_present[0]),
    current_stream=lambda device=None: _there().streams.current,
    stream=lambda stream: _present[0].streams.on(stream),
    device=nullcontext,
    synchronize=lambda device=None: _present[0].host_waits("synchronize"),
    memory_allocated=lambda device=None: _present[0].allocated,
    max_memory_allocated=lambda device=None: _present[0].peak,
    reset_peak_memory_stats=lambda device=None: setattr(_present[0], "peak", _present[0].allocated),
    empty_cache=lambda: None,
    get_device_name=lambda device=None: "stand-in",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=_present[0].capacity),
    get_rng_state=lambda device=None: torch.get_rng_state(),
    set_rng_state=lambda state, device=None: torch.set_rng_state(state),
)


@cache
def _registered() -> list[torch.library.Library]:
    """Make the kind of device known to torch, once for a process."""
    _setup_privateuseone_for_python_backend(NAME, _MODULE, _Hooks())
    kernels, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    for name in _VIEWS:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(_ATEN, packet), overload or "default")
        kernels.impl(name, partial(op.redispatch, SIZES_ONLY), "PrivateUse1")

    def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
        return _there().empty(torch.empty(size, dtype=dtype, memory_format=memory_format))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return _there().empty(torch.empty_strided(size, stride, dtype=dtype))

    kernels.impl("empty.memory_format", empty, "PrivateUse1")
    kernels.impl("empty_strided", empty_strided, "PrivateUse1")
    kernels.impl("_copy_from", lambda *args: _present[0].copy(*args), "PrivateUse1")
    kernels.impl("_local_scalar_dense", lambda tensor: _present[0].item(tensor), "PrivateUse1")
    kernels.impl("_to_copy", lambda *args, **kwargs: _present[0].moved(*args, **kwargs), "PrivateUse1")
    kernels.impl("is_pinned", _is_pinned, "CPU")
    kernels.impl("_pin_memory", lambda tensor, device=None: pinned(tensor.clone()), "CPU")
    # What a device has in place of the kernels that are the CPU's own.
    kernels.impl("_convert_weight_to_int4pack", _packed, "PrivateUse1")
    kernels.impl("_weight_int4pack_mm", partial(_of_device, _ATEN._weight_int4pack_mm_for_cpu.default), "PrivateUse1")
    kernels.impl("_weight_int8pack_mm", partial(_of_device, _ATEN._weight_int8pack_mm.default), "PrivateUse1")
    rest.fallback(lambda func, *args, **kwargs: _present[0].launch(func, *args, **kwargs), "PrivateUse1")
    return [kernels, rest]


def _of_device(func: Any, *args: Any) -> Any:
    return _present[0].launch(func, *args)


def _packed(pairs: Tensor, inner_tiles: int) -> Tensor:
    levels = torch.stack([pairs >> 4, pairs & 15], -1).flatten(1).to(torch.int32)
    packed: Tensor = _of_device(_ATEN._convert_weight_to_int4pack_for_cpu.default, levels, 1)
    return packed


@contextmanager
def present() -> Iterator[Accelerator]:
    """Let there be the device for the time of a `with` block."""
    _registered()
    accelerator = Accelerator()
    _present[:] = [accelerator]
    # Tables that are kept lie in the memory of another one.
    for kept in (tree_tables, growth_of):
        kept.cache_clear()
    # torch lists what makes tensors once, when a default device is first asked for: it must find its own functions.
    with torch.device("cpu"):
        torch.empty(0)
    with pytest.MonkeyPatch.context() as patch:
        for name in _PINNING:
            patch.setattr(torch, name, partial(_OF_TORCH, getattr(torch, name)))
        patch.setattr(Tensor, "record_stream", lambda *_: None)
        patch.setattr(Tensor, "__deepcopy__", partialmethod(_deep_copy, Tensor.__deepcopy__))
        patch.setattr(torch, "Generator", partial(_generator, torch.Generator))
        try:
            yield accelerator
        finally:
            _present.clear()


def _pinning(function: Any, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    found: Tensor = function(*args, **kwargs)
    return pinned(found) if pin_memory else found


# It stands in for torch's own, which recordings of passes may reach: they look at where a function is from.
_OF_TORCH = FunctionType(_pinning.__code__, {**globals(), "__name__": torch.__name__})
_OF_TORCH.__kwdefaults__ = _pinning.__kwdefaults__


def _generator(kind: Any, device: Any = "cpu") -> Any:
    # Operations run by the CPU's kernels, and so do those that draw.
    return kind("cpu" if torch.device(device).type == NAME else device)


def _deep_copy(tensor: Tensor, as_before: Any, memo: dict[int, Any]) -> Any:
    # Torch would copy the storage without asking for memory of the device.
    if tensor.device.type != NAME:
        return as_before(tensor, memo)
    if id(tensor) not in memo:
        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = (
            torch.nn.Parameter(copied, tensor.requires_grad) if type(tensor) is torch.nn.Parameter else copied
        )
    return memo[id(tensor)]
