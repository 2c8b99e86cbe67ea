"""Make a model without its weights, and record how each weight is made from the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from selfspec.arguments import shown
from selfspec.errors import CheckpointError, SelfSpecError, UnsupportedModelError, UnsupportedOptionError
from selfspec.formats.gguf import DTYPES as GGUF_DTYPES
from selfspec.model.checkpoint import dtype_of_index, load_model, weight_files
from selfspec.model.gguf import is_gguf
from selfspec.placement.gguf_file import gguf_weights
from selfspec.placement.quantised import (
    UnknownQuantisationError,
    is_made_dense,
    quantisation_of,
    quantised_weights,
    without_quantisation,
)
from selfspec.placement.stored import StoredWeight, WeightFiles, is_packed, packed_weights, stored_tensors

_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class _Read:
    """Reads a weight as it is stored in a file; `on_change` is called before a change in place is refused."""

    weight: StoredWeight
    files: WeightFiles
    on_change: Callable[[], None]

    def values(self) -> Tensor:
        return self.weight.read(self.files)

    def nbytes(self) -> int:
        return self.weight.shape.numel() * self.weight.dtype.itemsize

    def reads(self) -> list[_Read]:
        return [self]


@dataclass(frozen=True)
class _Call:
    """Gives the result of an operation; if it returns several tensors, one of them."""

    operation: Any
    args: Sequence[Any]
    options: Mapping[str, Any]
    number: int | None
    size: int

    def values(self) -> Tensor:
        found = _called(self.operation, self.args, self.options, _values)
        value: Tensor = found if self.number is None else found[self.number]
        return value

    def nbytes(self) -> int:
        view = any(argument.alias_info is not None for argument in self.operation._schema.arguments)
        return (0 if view else self.size) + sum(step.nbytes() for step in self._steps())

    def reads(self) -> list[_Read]:
        return [read for step in self._steps() for read in step.reads()]

    def _steps(self) -> list[_Read | _Call]:
        given = tree_leaves((self.args, self.options))
        return [each._step for each in given if isinstance(each, DeferredTensor)]


class DeferredTensor(Tensor):
    """Knows how to compute its values, of this shape, strides and dtype, and takes no memory.

    An operation returns another one; a result that is a number, or whose shape depends on values, reads the values.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _step: _Read | _Call

    @staticmethod
    def __new__(cls, step: _Read | _Call, like: Tensor) -> DeferredTensor:
        made: DeferredTensor = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        made._step = step
        return made

    @property
    def stored(self) -> StoredWeight | None:
        """The weight in a file that this tensor reads, perhaps with a cast; None: it is computed."""
        step = self._step
        if isinstance(step, _Call) and step.operation is _CAST:
            step = step.args[0]._step
        return step.weight if isinstance(step, _Read) else None

    @property
    def packed(self) -> StoredWeight | None:
        """The packed weight in a file that this tensor has the values of; None: there is none, or a cast rounds it.

        What is quantised already stays as it is in any dtype.
        """
        where = self.stored
        if where is None or where.format is None:
            return None
        rounds = where.format.packs and torch.promote_types(where.dtype, self.dtype) != self.dtype
        return None if rounds else where

    @property
    def dtype_in_files(self) -> torch.dtype:
        """The dtype that holds every value which this tensor is computed from."""
        return reduce(torch.promote_types, [read.weight.dtype for read in self._step.reads()])

    @property
    def nbytes_beside(self) -> int:
        """The most bytes that computing the values takes, without the values themselves."""
        return self._step.nbytes() - self.nbytes

    def values(self) -> Tensor:
        """Read and compute the values."""
        return self._step.values()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        operation: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        if operation in _SAME:
            return cls(args[0]._step, _meta(args[0]))
        arguments = operation._schema.arguments
        if operation._schema.is_mutable:
            _check_unchanged(operation, args, options)
            return _called(operation, args, options, _values)
        devices = [argument for argument in arguments if argument.name == "device"]
        if devices and operation is not _CAST:
            # New memory, which later operations write into.
            return _called(operation, args, {**options, "device": options.get("device") or "cpu"}, _meta)
        try:
            found = _called(operation, args, {name: each for name, each in options.items() if name != "device"}, _meta)
        except RuntimeError:
            found = None
        if isinstance(found, Tensor):
            return cls(_Call(operation, args, options, None, found.nbytes), found)
        if isinstance(found, list | tuple) and all(isinstance(each, Tensor) for each in found):
            return [cls(_Call(operation, args, options, at, each.nbytes), each) for at, each in enumerate(found)]
        return _called(operation, args, options, _values)


def _called(operation: Any, args: Sequence[Any], options: Mapping[str, Any], of: Callable[[Tensor], Tensor]) -> Any:
    """Call an operation with `of(tensor)` in place of each tensor."""
    given, named = tree_map_only(Tensor, of, (tuple(args), dict(options)))
    return operation(*given, **named)


def _values(tensor: Tensor) -> Tensor:
    return tensor.values() if isinstance(tensor, DeferredTensor) else tensor


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _check_unchanged(operation: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    arguments = operation._schema.arguments
    named = {argument.name: given for argument, given in zip(arguments, args, strict=False)} | dict(options)
    written = [named.get(argument.name) for argument in arguments if argument.is_write]
    changed = [each for each in tree_leaves(written) if isinstance(each, DeferredTensor)]
    for read in (read for each in changed for read in each._step.reads()):
        read.on_change()
    if changed:
        raise UnsupportedModelError(
            f"a weight of this checkpoint is changed in place while it is loaded ({operation}), which a memory budget "
            "has no way to put off; load it without one"
        )


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that weights may be computed in, and streamed from files in."""


def read_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype of weights or the dtype of its name; None: the checkpoint's own. Refuse any other."""
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return None
    named = {str(each).removeprefix("torch."): each for each in DTYPES}
    found = named.get(dtype) if isinstance(dtype, str) else dtype
    if found in DTYPES:
        return found
    raise UnsupportedOptionError(f"dtype={shown(dtype)}: weights are {', '.join(named)}, or auto, the checkpoint's own")


@dataclass(frozen=True)
class Skeleton:
    """Holds a model in evaluation mode whose weights take no memory, except those that depend on values in files.

    `deferred` has tied weights under their first name; `stored`, by every name, weights that files hold up to a cast.
    """

    model: PreTrainedModel
    deferred: dict[str, DeferredTensor]
    stored: dict[str, StoredWeight]


def skeleton(folder: Path, config: PreTrainedConfig, dtype: torch.dtype | None, files: WeightFiles) -> Skeleton:
    """Make the model of a checkpoint with `transformers`, without its weights; dtype None: the checkpoint's own."""
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} has an adapter (adapter_config.json), which a memory budget would leave out; merge it into the "
            "weights (merge_and_unload of peft, save_pretrained), or load the checkpoint without a budget"
        )
    weights: Mapping[str, StoredWeight | Tensor]
    quantisation = quantisation_of(config)
    if is_gguf(folder):
        if dtype not in (None, *GGUF_DTYPES):
            raise UnsupportedOptionError(
                f"dtype={dtype}: weights of a GGUF file are multiplied in float32 or float64; leave dtype out"
            )
        weights = gguf_weights(folder, config, files)
    elif is_packed(folder):
        weights = packed_weights(folder, files)
    else:
        tensors = stored_tensors(weight_files(folder, config))
        weights = {name: StoredWeight.dense(each) for name, each in tensors.items()}
        if quantisation is not None:
            try:
                weights = quantised_weights(quantisation, tensors, files)
                config = without_quantisation(config)
            except UnknownQuantisationError as error:
                if not is_made_dense(quantisation):
                    raise UnsupportedModelError(
                        f"{folder} has {error}, which no kernel reads; load it without memory= and weights=, as its "
                        "library runs it"
                    ) from error
    model = _loaded(folder, config, dtype, weights, files)
    model.name_or_path = model.config.name_or_path = str(folder)
    # As the loader does for a folder.
    if is_gguf(folder):
        model.generation_config = GenerationConfig.from_model_config(model.config)
    elif (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    else:
        model.generation_config = GenerationConfig.from_pretrained(folder, "config.json", _from_model_config=True)
    deferred: dict[str, DeferredTensor] = {}
    stored: dict[str, StoredWeight] = {}
    for names in names_by_weight(model).values():
        weight = model.get_parameter(names[0])
        if isinstance(weight, DeferredTensor):
            deferred[names[0]] = weight
            where = weight.stored
            is_dense = where is not None and where.format is None and where.dtype in DTYPES
            if where is not None and is_dense and weight.dtype == model.config.dtype:
                stored |= dict.fromkeys(names, where)
            empty = torch.empty_like(weight, device="meta")
            set_weight(model, names, nn.Parameter(empty, requires_grad=False))
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if isinstance(buffer, DeferredTensor):
                module._buffers[key] = buffer.values()
    return Skeleton(model.eval(), deferred, stored)


def names_by_weight(model: PreTrainedModel) -> dict[int, list[str]]:
    """Return all names of each parameter, by its id; tied parameters have several names."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return names


def set_weight(model: PreTrainedModel, names: Sequence[str], weight: nn.Parameter) -> None:
    """Replace the parameter that has these names."""
    for name in names:
        holder, _, leaf = name.rpartition(".")
        model.get_submodule(holder)._parameters[leaf] = weight


def _loaded(
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype | None,
    weights: Mapping[str, StoredWeight | Tensor],
    files: WeightFiles,
) -> PreTrainedModel:
    """Return the model with deferred weights, except those that its class changes in place after loading."""
    changed: set[str] = set()
    while True:
        known = len(changed)
        tensors = {
            key: weight
            if isinstance(weight, Tensor)
            else weight.read(files)
            if key in changed
            else DeferredTensor(_Read(weight, files, partial(changed.add, key)), weight.like())
            for key, weight in weights.items()
        }
        try:
            return load_model(str(folder), config, dtype or dtype_of_index(folder, config) or "auto", tensors)
        except SelfSpecError:
            if len(changed) == known:
                raise
