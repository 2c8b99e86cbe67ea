"""The state of a model that a recording of its passes depends on besides its inputs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from selfspec.model.overrides import GLOBAL_HOOKS
from selfspec.runtime.attention_kernels import attends_by_cudnn
from selfspec.runtime.reached_code import ReachedCode

# Compare these by value.
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
# Not read by a forward pass without gradients, or written by `transformers` in passing.
_NOT_READ = ("backward", "state_dict", "_non_persistent_buffers_set", "warnings_issued")


class ModelState:
    """A snapshot of everything in a model that a recording may depend on.

    These are the attributes of its modules, among them weights, children, hooks and what runs in place of a `forward`;
    its configurations; its classes; the functions that their code looks up by name, those of torch too; addresses,
    strides and offsets of weights and buffers; and settings of torch. Values of weights and buffers are not part of
    it: recordings read them in place.

    The snapshot holds every object, so that no new object can take its address, and compares by identity. A comparison
    walks lists without Python code for each entry: about 0.2 ms for a dozen layers.

    Attributes:
        others: names of functions that it may run and that others wrote: see `ReachedCode`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        code = ReachedCode(model)
        self.others = tuple(code.others)
        self._modules = tuple(model.modules())
        self._contents: list[Iterable[Any]] = []
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
        self._objects = self._found()
        self._layouts = self._laid_out()
        self._settings = _settings()

    def holds(self) -> bool:
        """Whether nothing has changed."""
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
        """Everything noted, in one list."""
        return (
            *chain.from_iterable(self._contents),
            *chain.from_iterable(names(space) for names, space in self._names),
            *map(type, self._modules),
        )

    def _laid_out(self) -> list[object]:
        """Addresses, strides and offsets of its tensors."""
        # The values of other tensors may be part of a recording.
        versions = [None if each.is_inference() else each._version for each in self._constants]
        return [*map(_layout, self._weights), *map(_layout, self._constants), *versions]


def _layout(tensor: Tensor) -> tuple[object, ...]:
    if tensor.layout is not torch.strided:
        # Such tensors have no address.
        return tensor.dtype, tensor.shape
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _is_same(found: Any, known: Any) -> bool:
    return found is known or (type(found) is type(known) and isinstance(found, _PLAIN) and bool(found == known))


def _settings() -> tuple[object, ...]:
    """The process-wide settings by which torch chooses kernels and dtypes."""
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
