"""Passes in which a token gets the same bits whatever is read beside it, on a CPU.

torch sums a product, or attention, of one row in another order than one of several, so that in bfloat16 a text may
go on with another token in a draft, in a batch and alone. Here each output is summed in one order: linear layers and
attention by selfspec's kernels, and functions of single numbers, whose ends torch computes in another way, in whole
vectors. The rest of a layer, norms above all, torch computes token by token as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.activations import ACT2CLS

from selfspec.architecture import Adapter
from selfspec.cache.shared_cache import recurrent_layers
from selfspec.errors import UnsupportedModelError, UnsupportedOptionError
from selfspec.kernels import native
from selfspec.model.registry import has_encoder
from selfspec.model.view import is_streamed, view_of, view_running
from selfspec.runtime.few_rows import is_plain
from selfspec.runtime.grouped_queries import asks_for_kernel, runs_stock_kernel, with_kernel
from selfspec.runtime.runtime import Eager

_Module = TypeVar("_Module", bound=nn.Module)

_NAME = "selfspec_alone"
_DTYPES = (torch.float32, torch.bfloat16)
# Functions of single numbers.
_POINTWISE = tuple(each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values())
# Numbers of the widest vector that torch computes at once, twice; and fewer than it shares among threads.
_VECTORS, _OF_A_THREAD = 64, 32768


@dataclass(frozen=True)
class BatchInvariant(Eager):
    """The stock modules, with products and attention that give a token the same bits whatever is read beside it.

    So a token's logits are the same alone, in a draft and in a batch, and text with a draft is plain decoding's in
    bfloat16, too. For models on a CPU in float32 or bfloat16, with selfspec's kernels built (`selfspec kernels`), made
    of linear layers, norms and attention over keys. The last bits are not `model.generate`'s.
    """

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        if not native.load_kernels():
            raise UnsupportedOptionError(
                "BatchInvariant needs selfspec's CPU kernels; build them (selfspec kernels), or leave the runtime out"
            )
        for reason in _reasons(model, adapter):
            raise UnsupportedModelError(f"BatchInvariant cannot run {type(model).__name__}: {reason}")

    def viewed(self, module: _Module) -> _Module:
        return cast(_Module, view_of(with_kernel(module, _NAME, runs_stock_kernel), _in_one_order))


def _reasons(model: PreTrainedModel, adapter: Adapter) -> Iterator[str]:
    if has_encoder(model):
        yield "its encoder reads all of an input at once"
    if recurrent_layers(model.config.get_text_config(decoder=True)):
        yield "it has layers with states in place of keys"
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            yield f"it runs on a CPU, and {name} is on {parameter.device}"
        if parameter.dtype not in _DTYPES:
            yield f"{name} is in {parameter.dtype}; load it with dtype float32 or bfloat16"
    for name, module in model.named_modules():
        if is_streamed(module):
            yield "its weights are streamed; load it without a budget"
        wide = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        if wide and not is_plain(module) and not isinstance(module, nn.Embedding):
            yield f"{name} ({type(module).__name__}) is no plain linear layer"
    for layer in adapter.decoder_layers(model):
        if not any(asks_for_kernel(part) and runs_stock_kernel(part) for part in layer.modules()):
            yield "it computes attention by itself; load it with attn_implementation='sdpa' where it knows that"


def _in_one_order(module: nn.Module, _: Mapping[str, nn.Module]) -> nn.Module | None:
    if is_plain(module) and module.weight.dtype in _DTYPES:
        return view_running(module, partial(_product, module))
    if type(module) in _POINTWISE and not any(True for _ in module.parameters()):
        return view_running(module, partial(_in_whole_vectors, module))
    return None


def _product(linear: nn.Linear, states: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        raise UnsupportedOptionError("BatchInvariant computes in the dtype of the weights; leave autocast out")
    rows = states.reshape(-1, linear.in_features).split(native.MOST_ROWS)
    found = torch.cat([native.few_rows(some, linear.weight, linear.bias) for some in rows])
    return found.view(*states.shape[:-1], linear.out_features)


def _in_whole_vectors(module: nn.Module, states: Tensor) -> Tensor:
    """Run a function of single numbers, `[..., size]` to the same, over rows that begin and end with a vector."""
    forward, size = type(module).forward, states.shape[-1]
    rows = functional.pad(states.flatten(0, -2), (0, -size % _VECTORS))
    at_once = max(1, (_OF_A_THREAD - 1) // rows.shape[1])
    return torch.cat([forward(module, some) for some in rows.split(at_once)])[:, :size].reshape(states.shape)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What `transformers` calls: queries `[batch, heads, tokens, head_dim]`, keys and values with some of the heads."""
    unusual = [name for name in ("position_bias", "s_aux", "softcap") if others.get(name) is not None]
    plain = attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1)
    if unusual or dropout or not plain:
        what = ", ".join(unusual) or ("dropout" if dropout else "a mask that is added, or one for each head")
        raise UnsupportedModelError(f"BatchInvariant cannot run {type(module).__name__}: its attention has {what}")
    asked = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = attention_mask is None and query.shape[2] > 1 and asked
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.selfspec.attend_alone(query, key, value, attention_mask, causal, scale), None


AttentionInterface.register(_NAME, _attend)
