"""Draft heads: an adapter before the model's final norm, and fewer rows of the language-model head."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.errors import UnsupportedModelError
from selfspec.model.view import replaced


@dataclass(frozen=True, eq=False)
class DraftHead:
    """Changes the logits of a draft path: `adapter` runs before the final norm, and only `tokens` can be drafted."""

    adapter: nn.Module | None = None
    tokens: Tensor | None = None

    def parts(
        self, view: nn.Module, model: PreTrainedModel, exit: str | None, rows: nn.Module | None = None
    ) -> dict[str, nn.Module]:
        """Return the modules that take the place of others in a view of a model, by attribute path.

        The input of the layer `exit` is the last state of the path; None: there is no exit. `rows` computes logits of
        `tokens`.
        """
        parts: dict[str, nn.Module] = {}
        if self.adapter is not None:
            assert exit is not None
            layer = view.get_submodule(exit)
            parts[exit] = replaced(layer, partial(_adapted, layer, _like(self.adapter, next(layer.parameters()))))
        if self.tokens is not None:
            name = plain_head(model)
            if name is None:
                raise UnsupportedModelError(
                    f"the head of {type(model).__name__} is no separate plain linear layer, so its rows cannot be left "
                    "out; draft with the whole vocabulary"
                )
            parts[name] = rows or _Rows(model.get_submodule(name), self.tokens)
        return parts

    def adapted(self, states: Tensor) -> Tensor:
        """Map states at the exit to the input of the model's final norm, `[..., hidden]` both."""
        if self.adapter is None:
            return states
        adapted: Tensor = _like(self.adapter, states)(states)
        return adapted

    def spread(self, logits: Tensor, vocabulary: int) -> Tensor:
        """Spread logits, `[batch, tokens, kept]` to `[batch, tokens, vocabulary]`: -inf, so q = 0, elsewhere."""
        return logits if self.tokens is None else spread(logits, self.tokens, vocabulary)

    def alone(self, logits: Tensor) -> Tensor:
        """Set logits, `[..., vocabulary]`, to -inf at tokens that cannot be drafted."""
        if self.tokens is None:
            return logits
        return self.spread(logits[..., self.tokens.to(logits.device)], logits.shape[-1])


def spread(logits: Tensor, tokens: Tensor | None, vocabulary: int) -> Tensor:
    """Spread logits of `tokens`, None: of the first ids, over a vocabulary, `[..., vocabulary]`; others get -inf."""
    if tokens is None:
        missing = vocabulary - logits.shape[-1]
        return nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
    whole = logits.new_full((*logits.shape[:-1], vocabulary), -torch.inf)
    return whole.index_copy_(-1, tokens.to(logits.device), logits)


def _like(adapter: nn.Module, weight: Tensor) -> nn.Module:
    """Return the adapter with the weight's device and dtype; a copy if needed, since other drafts may use it."""
    own = next(adapter.parameters())
    if own.device == weight.device and own.dtype == weight.dtype:
        return adapter
    return copy.deepcopy(adapter).to(weight.device, weight.dtype)


def _adapted(layer: nn.Module, adapter: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer of a view, then an adapter on its output."""
    output = layer(*args, **kwargs)
    return (adapter(output[0]), *output[1:]) if isinstance(output, tuple) else adapter(output)


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
