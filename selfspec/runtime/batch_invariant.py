"""Run passes on a CPU in which a token gets the same bits whatever is read beside it.

torch sums a product or attention of one row in another order than that of several rows, so in bfloat16 a text may
continue with other tokens in a draft, in a batch and alone. Here selfspec's kernels run linear layers and attention in
one order, and pointwise functions, whose last elements torch computes in another way, run in whole vectors. The rest of
a layer, mainly norms, torch already computes token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.activations import ACT2CLS

from selfspec.architecture import Adapter
from selfspec.cache.shared_cache import recurrent_layers
from selfspec.errors import UnsupportedModelError, UnsupportedOptionError
from selfspec.kernels import native
from selfspec.model.registry import has_encoder
from selfspec.model.view import is_streamed, view_of, view_running, view_with
from selfspec.runtime.few_rows import asks_for_kernel, is_plain, runs_stock_kernel, with_kernel
from selfspec.runtime.runtime import Eager

_Module = TypeVar("_Module", bound=nn.Module)

_NAME = "selfspec_alone"
# Pointwise functions.
_POINTWISE = tuple(each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values())
# Pointwise functions that a mixture of experts may call itself, and products that it may not call.
_OF_NUMBERS = frozenset(
    {torch.sigmoid, Tensor.sigmoid, torch.exp, Tensor.exp, torch.tanh, Tensor.tanh, functional.silu, functional.gelu}
)
_OTHER_PRODUCTS = frozenset(
    {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.einsum}
    | {torch.addmm, Tensor.addmm, torch.baddbmm, functional.grouped_mm}
)
# Twice the numbers in torch's widest vector; and the count of numbers from which torch uses several threads.
_VECTORS, _OF_A_THREAD = 64, 32768


@dataclass(frozen=True)
class BatchInvariant(Eager):
    """Runs the stock modules with products and attention that give a token the same bits whatever is read beside it.

    A token's logits are the same alone, in a draft and in a batch, so drafts leave the text of plain decoding unchanged
    in bfloat16, too. It runs models on a CPU in float32, bfloat16 or float16, made of linear layers, mixtures of
    experts, norms and attention over keys, and needs selfspec's CPU kernels. The last bits differ from those of
    `model.generate`.
    """

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        if not native.available():
            raise UnsupportedOptionError(
                f"BatchInvariant needs selfspec's CPU kernels ({native.absence()}); or leave the runtime out"
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
        if parameter.dtype not in native.IN_FLOAT32:
            yield f"{name} is in {parameter.dtype}; load it with dtype float32, bfloat16 or float16"
    # Routers are siblings of their experts, or part of the module that holds them.
    mixing = {id(part) for block in model.modules() if _mixes(block) for part in (block, *block.children())}
    for name, module in model.named_modules():
        if is_streamed(module):
            yield "its weights are streamed; load it without a budget"
        wide = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        if wide and not is_plain(module) and not isinstance(module, nn.Embedding) and id(module) not in mixing:
            yield f"{name} ({type(module).__name__}) is no plain linear layer"
    for layer in adapter.decoder_layers(model):
        if not any(asks_for_kernel(part) and runs_stock_kernel(part) for part in layer.modules()):
            yield "it computes attention by itself; load it with attn_implementation='sdpa' where it knows that"


def _in_one_order(module: nn.Module, parts: Mapping[str, nn.Module]) -> nn.Module | None:
    if is_plain(module) and module.weight.dtype in native.IN_FLOAT32:
        return view_running(module, lambda states: _of_rows(states, module.weight, module.bias))
    if type(module) in _POINTWISE and not any(True for _ in module.parameters()):
        return view_running(module, partial(_in_whole_vectors, partial(type(module).forward, module)))
    if _is_experts(module) or _mixes(module):
        view = view_with(module, parts)
        # Run expert by expert, as transformers' own forward does; other ways sort and pad tokens. A bound method still
        # works if parts of the view are replaced again, as by a draft in fewer bits.
        forward = getattr(type(module).forward, "__wrapped__", None) if _is_experts(module) else _mixed
        view.__dict__["forward"] = MethodType(cast(Callable[..., Any], forward), view)
        return view
    return None


def _is_experts(module: nn.Module) -> bool:
    """Return whether a module holds the experts of a mixture, which `transformers` can run in several ways."""
    return hasattr(type(module).forward, "__wrapped__") and getattr(module, "is_transposed", None) is False


def _mixes(module: nn.Module) -> bool:
    """Return whether a module sends tokens to experts that it holds."""
    return any(map(_is_experts, module.children()))


def _mixed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _InOneOrder():
        return type(block).forward(block, *args, **kwargs)


class _InOneOrder(TorchFunctionMode):
    """Replaces functions that a module calls itself by products with one summation order and whole vectors."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is functional.linear:
            return _of_rows(*args, **(kwargs or {}))
        if function in _OF_NUMBERS and not kwargs:
            return _in_whole_vectors(function, *args)
        if function in _OTHER_PRODUCTS:
            name = getattr(function, "__name__", function)
            raise UnsupportedModelError(
                f"BatchInvariant cannot run this mixture of experts, which calls {name} itself; leave the runtime out"
            )
        return function(*args, **(kwargs or {}))


def _of_rows(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        raise UnsupportedOptionError("BatchInvariant computes in the dtype of the weights; leave autocast out")
    return native.few_rows(input, weight, bias)


def _in_whole_vectors(function: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """Run a pointwise function, `[..., size]` to the same shape, over rows padded to whole vectors."""
    size = states.shape[-1]
    rows = functional.pad(states.flatten(0, -2), (0, -size % _VECTORS))
    at_once = max(1, (_OF_A_THREAD - 1) // rows.shape[1])
    return torch.cat([function(some) for some in rows.split(at_once)])[:, :size].reshape(states.shape)


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
    """Attend as `transformers` asks: queries `[batch, heads, tokens, size]`, keys and values with some of the heads."""
    unusual = [name for name in ("position_bias", "s_aux", "softcap") if others.get(name) is not None]
    plain = attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1)
    if unusual or dropout or not plain:
        what = ", ".join(unusual) or ("dropout" if dropout else "a mask that is added, or one for each head")
        raise UnsupportedModelError(f"BatchInvariant cannot run {type(module).__name__}: its attention has {what}")
    asked = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = attention_mask is None and query.shape[2] > 1 and asked
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return native.attend_alone(query, key, value, attention_mask, causal, scale), None


AttentionInterface.register(_NAME, _attend)
