"""Memory of the stand-in accelerator: the host's, in tensors that torch takes for those of another device.

A tensor is made through DLPack, whose kind for devices of an extension torch calls `PrivateUse1`. So it is a true
tensor of that device: views share its storage, parameters are parameters, and nothing about it is a subclass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_EXTENSION = 12
_MOST_DIMENSIONS = 8


class _Managed(ctypes.Structure):
    """`DLManagedTensor`, with sizes and strides behind it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * _MOST_DIMENSIONS),
        ("steps", ctypes.c_int64 * _MOST_DIMENSIONS),
    )


_SIZE, _SHAPE, _STRIDES = ctypes.sizeof(_Managed), _Managed.sizes.offset, _Managed.steps.offset
# What `bool`, `bfloat16` and unsigned integers are called; all others are floats or integers.
_NAMED = {torch.bool: 6, torch.bfloat16: 4, torch.uint8: 1}
# Tests put others in their places.
_empty = torch.empty
_C = ctypes.CDLL(None)
_C.malloc.restype = ctypes.c_void_p
_C.malloc.argtypes = [ctypes.c_size_t]
_FREE = ctypes.cast(_C.free, ctypes.c_void_p).value
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# Kernels of the CPU that only look at sizes, which do for every device.
SIZES_ONLY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Memory:
    """One piece of the device's memory. It lives as long as torch's storage, which holds it."""

    def __init__(self, held: torch.UntypedStorage, freed: Callable[[int], None], pool: object) -> None:
        self.held, self.nbytes, self.pool = held, held.nbytes(), pool
        self._freed = freed

    def __del__(self) -> None:
        self._freed(self.nbytes)

    def view(self, like: Tensor) -> Tensor:
        """Return the host's tensor of the sizes and strides of a tensor of the device."""
        empty = _empty(0, dtype=like.dtype)
        return empty.set_(self.held, like.storage_offset(), like.shape, like.stride())


def memory_of(tensor: Tensor) -> Memory:
    """Return the memory under a tensor of the device."""
    found: Memory = tensor.untyped_storage().memory  # type: ignore[attr-defined]
    return found


def device_tensor(memory: Memory, like: Tensor) -> Tensor:
    """Return a tensor of the device over new memory, of the sizes of one of the host, which begins with its memory."""
    address = _C.malloc(_SIZE)
    ctypes.memset(address, 0, _SIZE)
    managed, dtype = _Managed.from_address(address), like.dtype
    managed.data = memory.held.data_ptr()
    managed.device[0] = _EXTENSION
    managed.dimensions = like.dim()
    managed.code = _NAMED.get(dtype, 2 if dtype.is_floating_point else 0)
    managed.bits, managed.lanes = 8 * dtype.itemsize, 1
    managed.sizes[: like.dim()], managed.steps[: like.dim()] = like.shape, like.stride()
    managed.shape, managed.strides = address + _SHAPE, address + _STRIDES
    # No Python may run when a storage goes, which can be while an error is on its way.
    managed.deleter = _FREE
    found: Tensor = torch.utils.dlpack.from_dlpack(_capsule(address, b"dltensor", None))
    found.untyped_storage().memory = memory  # type: ignore[attr-defined]
    return found


def repointed(tensor: Tensor, storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Let a tensor of the device lie in another storage, with the sizes of one of the host."""
    place: tuple[Any, ...] = (like.storage_offset(), list(like.shape), list(like.stride()))
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    found: Tensor = set_.redispatch(SIZES_ONLY, tensor, storage, *place)
    return found


def spoil(storage: torch.UntypedStorage) -> None:
    """Fill memory with nonsense: NaN, -1, and truths that are neither."""
    _empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
