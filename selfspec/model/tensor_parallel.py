"""A model whose weights lie in parts on several processes: which these are, and what they must do alike.

`transformers` splits a model by its plan (`tp_plan="auto"` under torchrun): weights become DTensors, and the forwards
of the modules that hold them exchange what is missing. Every process runs the same program on the same tokens. A
decision that one of them would take differently would leave the others waiting, so such decisions are rank 0's.
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
    """The processes that hold parts of one model: a group of `torch.distributed`, and the device of this one's part."""

    group: Any
    device: torch.device

    def of_first(self, number: int) -> int:
        """Return what rank 0 gives for a number, on every rank. All ranks must call this."""
        shared = torch.tensor([number], dtype=torch.long, device=self.device)
        torch.distributed.broadcast(shared, group=self.group, group_src=0)
        return int(shared.item())

    def check_alike(self, what: str, value: object) -> None:
        """Refuse what differs between ranks in its representation. All ranks must call this.

        Raises:
            UnsupportedOptionError: on every rank, if any has another value.
        """
        # 48 bits of it, and their negative: equal everywhere if the largest of both cancel out.
        found = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:6], "big")
        largest = torch.tensor([found, -found], dtype=torch.long, device=self.device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=self.group)
        if int(largest.sum().item()) != 0:
            raise UnsupportedOptionError(
                f"the processes of this model differ in {what} (here: {value!r}); give all of them the same"
            )

    def check_computes_alike(self) -> None:
        """Refuse processes whose last bits may differ, and with them a token. All ranks must call this.

        Raises:
            UnsupportedOptionError: they differ in versions, threads, processor or kernels.
        """
        self.check_alike(
            "what they compute with",
            (
                torch.__version__,
                platform.machine(),
                torch.backends.cpu.get_cpu_capability(),
                torch.get_num_threads() > 1,
                native.load_kernels(),
                os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            ),
        )


def ranks_of(model: nn.Module) -> Ranks | None:
    """Return the processes that a model's weights lie on; None: on this one alone.

    Raises:
        UnsupportedModelError: they are spread in another way than by tensor parallelism.
    """
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
    """Refuse something for a model that lies on several processes.

    Raises:
        UnsupportedModelError: it does; says what to do.
    """
    if ranks_of(model) is not None:
        raise UnsupportedModelError(f"{what} takes a model on one process; load it without tp_plan (docs/scaling.md)")


def whole(weight: Tensor) -> Tensor:
    """Return a weight as one process alone would have it, gathered if it lies on several. All ranks must call this."""
    spread = _spread(weight)
    return weight if spread is None else spread.full_tensor()


@dataclass(frozen=True)
class LocalPart:
    """This process's part of a linear layer.

    Attributes:
        weight: `[out, in]`, of which one is a part.
        bias: of the output that the process gets; None: there is none.
        split: "out": the layer gives a part of its output. "in": it gets a part of its input, and its output is summed
            over processes before the bias is added.
        group: the processes.
    """

    weight: Tensor
    bias: Tensor | None
    split: Literal["out", "in"]
    group: Any


def local_part(module: nn.Module) -> LocalPart | None:
    """Return this process's part of a linear layer; None: it lies on one process, or is split in a way of its own."""
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
    """A weight that lies on several processes; None: it does not."""
    return weight if weight is not None and hasattr(weight, "device_mesh") else None
