"""Routed experts, weights of three dimensions beside a router with `top_k`: run fewer, and count what passes read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from selfspec.architecture import Adapter, Part
from selfspec.model.view import view_of, view_with, view_with_parts

# Tokens of a pass over which the cost of a further token is averaged.
_TOKENS = 5


@dataclass(frozen=True)
class Experts:
    """Holds the routed experts of an MLP: their weights, `[experts, ...]` each, and how many a token is sent to."""

    weights: tuple[Tensor, ...]
    active: int

    @property
    def number(self) -> int:
        """Number of experts."""
        return int(self.weights[0].shape[0])

    def share(self, tokens: int = 1, most: int | None = None) -> float:
        """Return the share of experts read by `tokens` tokens that choose at most `most` each, independently."""
        return 1 - (1 - min(self.active, most or self.active, self.number) / self.number) ** tokens


def experts_of(model: nn.Module, adapter: Adapter) -> list[Experts]:
    """Return the routed experts of all decoder layers of a model."""
    found = []
    for layer in adapter.decoder_layers(model):
        for mlp in map(layer.get_submodule, adapter.modules_of(layer, Part.MLP)):
            active = max((_active(module) for module in mlp.modules()), default=0)
            weights = tuple(weight for weight in mlp.parameters() if weight.ndim == 3)
            if active and weights:
                found.append(Experts(weights, active))
    return found


def shares_read(experts: Sequence[Experts], most: int | None = None) -> Mapping[int, float]:
    """Return the share of expert weights that one token reads, by the number of experts."""
    return {each.number: each.share(most=most) for each in experts}


def widening_by_experts(experts: Sequence[Experts], step: float) -> float:
    """Return the cost of the experts that a further token of a pass adds, in steps that read `step` bytes."""
    more = sum((each.share(_TOKENS) - each.share()) * weight.nbytes for each in experts for weight in each.weights)
    return more / (_TOKENS - 1) / step


def with_fewer_experts(layer: nn.Module, mlps: Sequence[str], most: int) -> nn.Module:
    """Return a view of a layer whose named MLPs send a token to at most `most` experts; itself if they already do."""
    parts = {name: view_of(layer.get_submodule(name), partial(_limited, most)) for name in mlps}
    changed = {name: part for name, part in parts.items() if part is not layer.get_submodule(name)}
    return view_with_parts(layer, changed) if changed else layer


def _active(module: nn.Module) -> int:
    """Return how many experts a router sends a token to; 0 if the module is no router."""
    top_k = vars(module).get("top_k")
    return top_k if type(top_k) is int else 0


def _limited(most: int, module: nn.Module, others: Mapping[str, nn.Module]) -> nn.Module | None:
    if _active(module) <= most:
        return None
    view = view_with(module, others)
    view.__dict__["top_k"] = most
    return view
