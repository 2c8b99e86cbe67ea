"""Models whose weights `transformers` splits over processes (`tp_plan`): find these, and keep their decisions alike.

A process that decided differently would let the others wait forever, so rank 0 decides.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selfspec.errors import UnsupportedModelError, UnsupportedOptionError
from selfspec.kernels import native


@dataclass(frozen=True)
class Ranks:
    """Holds the group of `torch.distributed` that shares a model, and the device of this process's part."""

    group: Any
    device: torch.device

    def of_first(self, number: int) -> int:
        """Return rank 0's `number` on every rank. All ranks must call this."""
        shared = torch.tensor([number], dtype=torch.long, device=self.device)
        torch.distributed.broadcast(shared, group=self.group, group_src=0)
        return int(shared.item())

    def check_alike(self, what: str, value: object) -> None:
        """Refuse a value whose `repr` differs between ranks. All ranks must call this."""
        # Take 48 bits and their negative: all ranks agree if the maxima of both cancel out.
        found = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:6], "big")
        largest = torch.tensor([found, -found], dtype=torch.long, device=self.device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=self.group)
        if int(largest.sum().item()) != 0:
            raise UnsupportedOptionError(
                f"the processes of this model differ in {what} (here: {value!r}); give all of them the same"
            )

    def check_computes_alike(self) -> None:
        """Refuse processes whose results may differ in the last bits, and so in a token. All ranks must call this."""
        self.check_alike(
            "what they compute with",
            (
                torch.__version__,
                platform.machine(),
                torch.backends.cpu.get_cpu_capability(),
                torch.get_num_threads() > 1,
                native.available(),
                os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            ),
        )


def ranks_of(model: nn.Module) -> Ranks | None:
    """Return the processes that hold a model's weights; None: only this one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    mesh = next((found.device_mesh for weight in model.parameters() if (found := _spread(weight)) is not None), None)
    if mesh is None or mesh.size() == 1:
        return None
    if mesh.ndim > 1 and (mesh.mesh_dim_names is None or "tp" not in mesh.mesh_dim_names):
        raise UnsupportedModelError(
            f"the weights of {type(model).__name__} are spread over processes by {mesh.mesh_dim_names}; selfspec "
            'decodes models that are split by tensor parallelism alone: load it with tp_plan="auto"'
        )
    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return Ranks(group, next(model.parameters()).device)


def check_on_one_process(model: nn.Module, what: str) -> None:
    """Refuse a model that is split over several processes, for the operation `what`."""
    if ranks_of(model) is not None:
        raise UnsupportedModelError(f"{what} takes a model on one process; load it without tp_plan (docs/scaling.md)")


def whole(weight: Tensor) -> Tensor:
    """Return the whole weight, gathered if it is split over processes. All ranks must call this."""
    spread = _spread(weight)
    return weight if spread is None else spread.full_tensor()


@dataclass(frozen=True)
class LocalPart:
    """Holds this process's part of a linear layer: its weight, `[out, in]`, and its bias.

    With split "out" it returns a part of the output; with "in" it gets a part of the input, and sums before the bias.
    """

    weight: Tensor
    bias: Tensor | None
    split: Literal["out", "in"]
    group: Any


def local_part(module: nn.Module) -> LocalPart | None:
    """Return this process's part of a linear layer; None: it is not split, or split in some other way."""
    weight = _spread(module._parameters.get("weight"))
    if type(module) is not nn.Linear or weight is None:
        return None
    from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel

    forward = vars(module).get("forward")
    style: Any = None if forward is None else inspect.getclosurevars(forward).nonlocals.get("self")
    bias = module._parameters.get("bias")
    local_bias = None if bias is None else getattr(bias, "to_local", lambda: bias)()
    mesh = weight.device_mesh
    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    local = weight.to_local()
    if type(style) is ColwiseParallel and style.use_local_output and _is_last(style.output_layouts):
        return LocalPart(local, local_bias, "out", group)
    if type(style) is RowwiseParallel and _is_last(style.input_layouts) and style.output_layouts.is_replicate():
        return LocalPart(local, local_bias, "in", group)
    return None


def _is_last(layout: Any) -> bool:
    return bool(layout.is_shard(-1))


def _spread(weight: Tensor | None) -> Any:
    """Return the weight if it is split over processes, else None."""
    return weight if weight is not None and hasattr(weight, "device_mesh") else None
