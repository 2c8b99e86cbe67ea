"""Draft heads: an adapter before the model's final norm, and fewer rows of the language-model head."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.errors import UnsupportedModelError
from selfspec.model.view import view_with


@dataclass(frozen=True, eq=False)
class DraftHead:
    """Changes the logits of a draft path: `adapter` runs before the final norm, and only `tokens` can be drafted."""

    adapter: nn.Module | None = None
    tokens: Tensor | None = None

    def install(
        self, view: nn.Module, model: PreTrainedModel, layer: nn.Module | None, rows: nn.Module | None = None
    ) -> None:
        """Install the head in a view of a model that has its own views of the modules on the way to layers and head.

        The input of `layer` is the last state of the path; None: there is no exit. `rows` computes logits of `tokens`.
        """
        if self.adapter is not None:
            assert layer is not None
            holder, name = _holder(view, layer)
            holder._modules[name] = _Adapted(layer, _like(self.adapter, next(layer.parameters())))
        if self.tokens is not None:
            name = head_name(model)
            set_head(view, name, rows or _Rows(model.get_submodule(name), self.tokens))

    def adapted(self, states: Tensor) -> Tensor:
        """Map states at the exit to the input of the model's final norm, `[..., hidden]` both."""
        if self.adapter is None:
            return states
        adapted: Tensor = _like(self.adapter, states)(states)
        return adapted

    def spread(self, logits: Tensor, vocabulary: int) -> Tensor:
        """Spread logits, `[batch, tokens, kept]` to `[batch, tokens, vocabulary]`: -inf, so q = 0, elsewhere."""
        if self.tokens is None:
            return logits
        spread = logits.new_full((*logits.shape[:-1], vocabulary), -torch.inf)
        return spread.index_copy_(-1, self.tokens.to(logits.device), logits)

    def alone(self, logits: Tensor) -> Tensor:
        """Set logits, `[..., vocabulary]`, to -inf at tokens that cannot be drafted."""
        if self.tokens is None:
            return logits
        return self.spread(logits[..., self.tokens.to(logits.device)], logits.shape[-1])


def _holder(view: nn.Module, layer: nn.Module) -> tuple[nn.Module, str]:
    """Return the module of the view that holds the layer, and the layer's name there."""
    return next(
        (module, name) for module in view.modules() for name, child in module._modules.items() if child is layer
    )


def _like(adapter: nn.Module, weight: Tensor) -> nn.Module:
    """Return the adapter with the weight's device and dtype; a copy if needed, since other drafts may use it."""
    own = next(adapter.parameters())
    if own.device == weight.device and own.dtype == weight.dtype:
        return adapter
    return copy.deepcopy(adapter).to(weight.device, weight.dtype)


class _Adapted(nn.Module):
    """Runs a layer of a view, then an adapter on its output."""

    def __init__(self, layer: nn.Module, adapter: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.adapter = adapter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.layer(*args, **kwargs)
        if isinstance(output, tuple):
            return self.adapter(output[0]), *output[1:]
        return self.adapter(output)

    def __getattr__(self, name: str) -> Any:
        # Some models read attributes of their layers, such as the type.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class _Rows(nn.Module):
    """Computes some rows of a linear head."""

    def __init__(self, head: nn.Module, tokens: Tensor) -> None:
        super().__init__()
        assert isinstance(head, nn.Linear)
        weight, bias = head.weight, head.bias
        rows = tokens.to(weight.device)
        self.weight = weight.detach()[rows]
        self.bias = None if bias is None else bias.detach()[rows]

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.weight, self.bias)


def plain_head(model: PreTrainedModel) -> str | None:
    """Return the attribute path to the language-model head; None: it is no separate plain linear layer."""
    head = model.get_output_embeddings()
    # A subclass may compute more than a linear product.
    if type(head) is not nn.Linear:
        return None
    return next((name for name, child in model.named_modules() if child is head), None)


def set_head(view: nn.Module, name: str, head: nn.Module) -> None:
    """Replace the head in a view of a model, at the attribute path from `plain_head`."""
    holder, _, rest = name.partition(".")
    if not rest:
        view._modules[name] = head
        return
    # The view may share the module that holds the head with the model.
    view._modules[holder] = inside = view_with(view.get_submodule(holder), {})
    set_head(inside, rest, head)


def head_name(model: PreTrainedModel) -> str:
    """Return the attribute path to the language-model head."""
    name = plain_head(model)
    if name is None:
        raise UnsupportedModelError(
            f"the head of {type(model).__name__} is no separate plain linear layer, so its rows cannot be left out; "
            "draft with the whole vocabulary"
        )
    return name
