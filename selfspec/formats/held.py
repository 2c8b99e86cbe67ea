"""Hold a model's own weights in an exact format: modules stay as they are, and their weights take fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from selfspec.formats.format import Format
from selfspec.formats.packed import PackedWeight, dense, held_packed
from selfspec.kernels.large_pages import LargePages


class Holder:
    """Packs weights, `[out, in]`, in an exact format and puts them into modules."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self._pages = LargePages()

    def packed(self, weight: Tensor) -> nn.Parameter | None:
        """Return what a module holds in place of a weight; None: the format does not keep it in fewer bytes."""
        if weight.ndim != 2 or not self._format.takes(weight):
            return None
        try:
            packed = self._format.pack(weight)
        except RuntimeError:
            return None
        layer = self._format.layer(packed, None, weight.dtype)
        for part in layer.parameters():
            part.data = self._pages.moved(part.data)
        return held_packed(layer)


def hold(module: nn.Module, name: str, weight: nn.Parameter) -> None:
    """Let a module hold a packed weight. Its `state_dict` has the dense one."""
    module._parameters[name] = weight
    module._register_state_dict_hook(_made_dense)


def _made_dense(module: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    for name in module._parameters:
        if prefix + name in state:
            state[prefix + name] = dense(state[prefix + name])


def places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield each weight that a linear layer or an embedding holds, with its module and name there."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and isinstance(module, nn.Linear | nn.Embedding) and not isinstance(weight, PackedWeight):
            yield module, "weight", weight
