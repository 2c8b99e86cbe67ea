"""The graph of one pass: what the stock view computes, with attention, products and norms as operators of selfspec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from selfspec.runtime.grouped_queries import with_kernel
from selfspec.runtime.native.instructions import Sight
from selfspec.runtime.native.noting import Noted, noted
from selfspec.runtime.pass_function import PassFunction, PassTensors
from selfspec.runtime.runtime import RecordingError

_NAME = "selfspec_recorded_attention"


@dataclass(frozen=True)
class Capture:
    """A captured pass.

    Attributes:
        noted: takes the tensors of `PassTensors.flat` and then the masks.
        sights: of each mask.
    """

    noted: Noted
    sights: tuple[Sight, ...]


def with_recorded_attention(model: nn.Module) -> nn.Module:
    """Make a view of a model whose attentions are one operator each, which stands for them in a graph."""
    return with_kernel(model, _NAME, _can_be_recorded)


@torch.no_grad()
def captured(function: PassFunction, example: PassTensors) -> Capture:
    """Capture a pass of a view `with_recorded_attention`, without running it.

    Raises:
        RecordingError: its masks are of a kind that programs do not know.
    """
    flat = example.flat()
    masks = function.masks(flat)
    by_type = masks if isinstance(masks, dict) else {None: masks}
    made = {name: mask for name, mask in by_type.items() if mask is not None}
    sights = tuple(_sight(name, function) for name in made)

    def whole(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(made, tensors[len(flat) :], strict=True))
        mask = {**by_type, **given} if isinstance(masks, dict) else given[None]
        return function.masked(tensors[: len(flat)], mask).flat()

    return Capture(noted(whole, [*flat, *made.values()]), sights)


def _sight(name: str | None, function: PassFunction) -> Sight:
    """What tokens see under the mask of a type of layers."""
    view, sliding = function.kind.path.view, _window(name, function.config)
    return Sight(sliding, view.window, view.top_keys is not None and sliding is None)


def _window(name: str | None, config: Any) -> int | None:
    if name == "full_attention":
        return None
    if name in ("sliding_attention", None):
        window: int | None = getattr(config, "sliding_window", None)
        return window
    raise RecordingError(f"masks of {name} are not known to programs")


def _can_be_recorded(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) in ("sdpa", "eager")


def _recorded(
    _: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What `transformers` calls: queries `[batch, heads, tokens, head_dim]`, keys and values with as many or fewer."""
    unknown = [name for name, value in others.items() if name not in _SAID_ELSEWHERE and value]
    if unknown:
        raise RecordingError(f"attention takes {', '.join(unknown)}, which programs do not know")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = torch.ops.selfspec.attend(query, key, value, attention_mask, float(scale), softcap or 0.0)
    return output, None


# Masks say what these say.
_SAID_ELSEWHERE = (
    "is_causal",
    "sliding_window",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "position_ids",
    "cache_position",
    "cache",
    "past_key_values",
    "past_key_value",
    "layer_past",
)
AttentionInterface.register(_NAME, _recorded)
