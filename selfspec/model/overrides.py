"""Find methods and hooks that replace or extend the code of `transformers`.

Passes run the model's own `forward` with its hooks, so these take effect. The loop of `model.generate` does not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import PreTrainedModel

from selfspec.errors import UnsupportedModelError
from selfspec.model.registry import has_encoder
from selfspec.model.view import has_other_forward

GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = (_global_forward_hooks, _global_forward_pre_hooks)
"""Hooks of all modules of the process, by number."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Methods that `model.generate` calls after reading its arguments, for each token or for the cache.
_LOOP = (
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_prepare_cache_for_generation",
    "_prefill",
    "_sample",
    "_has_unfinished_sequences",
)
_KNOWN = ("transformers.", "torch.")


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, before or after its `forward`."""
    return any(module.__dict__[hooks] for hooks in _HOOKS)


def base_alone(model: nn.Module, base: str) -> bool:
    """Return whether only code of `transformers` and torch runs around the part `base` of a model.

    Such code passes its inputs on to the base unchanged, so a pass that needs no logits may run the base alone.
    """
    path = base.split(".")
    around = [model.get_submodule(".".join(path[:length])) for length in range(len(path))]
    return not any(GLOBAL_HOOKS) and not any(
        has_hooks(module)
        or has_other_forward(module)
        or type(module).__call__ is not nn.Module.__call__
        or not _is_published(type(module).forward)
        for module in around
    )


def check_loop(model: PreTrainedModel) -> None:
    """Refuse a model that overrides methods of the loop of `model.generate`, which does not run here.

    Soft prompts are fine: the instance's `prepare_inputs_for_generation` is called for the first inputs.

    Raises:
        UnsupportedModelError: naming the method.
    """
    # On the instance, these two call the method they replaced, or come from a folder with a recipe.
    kind, shadows = type(model), vars(model).keys() - {"generate", "prepare_inputs_for_generation"}
    # A model with an encoder may have its own `generate`, which decodes in pieces.
    for name in _LOOP if has_encoder(model) else ("generate", *_LOOP):
        found = getattr(model if name in shadows else kind, name)
        if not _is_published(getattr(found, "__func__", found)):
            raise UnsupportedModelError(
                f"{type(model).__name__} has a {name} of its own, which would not be called here, so that its text "
                "could be another; use model.generate, do the same in forward or in a hook, or take the method away if "
                "it changes nothing"
            )


def _is_published(function: Callable[..., Any]) -> bool:
    """Return whether a function, and every function it wraps, is from `transformers` or torch."""
    each: Any = function
    while each is not None:
        # A wrapper takes over the wrapped function's `__module__`; its globals show its real module.
        if not str(getattr(each, "__globals__", {}).get("__name__")).startswith(_KNOWN):
            return False
        each = getattr(each, "__wrapped__", None)
    return True
