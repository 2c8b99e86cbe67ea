"""Handle the differences between the supported versions of `transformers`, each in one place.

Since 5.24 every `forward` calls its cache `cache`; before, it was `past_key_values`, or `cache_params` in models that
have only recurrent states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import lru_cache
from typing import Any

import transformers
from torch import nn
from transformers.generation import GenerateDecoderOnlyOutput

from selfspec.errors import UnsupportedModelError

NEWEST_TESTED = {"torch": "2.15", "transformers": "5.24"}
"""Newest minor releases that the tests have run on; the next one is accepted too, and `doctor` says so."""

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of the cache among the arguments of stock models."""

CACHE_LENGTH_NAMES = ("cache_length", "past_key_values_length")
"""Names of the cache's length among the arguments of modules that embed positions."""


def cache_name(names: Iterable[str]) -> str | None:
    """Return the name of the cache among names of arguments, or None if there is none."""
    given = frozenset(names)
    return next((name for name in CACHE_NAMES if name in given), None)


OUTPUT_CACHE = next(field.name for field in fields(GenerateDecoderOnlyOutput) if field.name in CACHE_NAMES)
"""Name of the cache in the output of `model.generate`."""


OLDER_THAN_5_21 = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21)
"""True if this version builds or runs some model types wrongly; `adapters/refused.py` names them."""


RENAMED_CACHE = OUTPUT_CACHE == "cache"
"""True in 5.24 and newer."""


def forward_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names that the `forward` of a model's class takes.

    A user's own `forward` with `**kwargs` passes them on to the class that it extends.
    """
    names: set[str] = set()
    for kind in type(model).__mro__:
        forward = vars(kind).get("forward")
        if forward is None:
            continue
        taken, hands_on = _taken_by(forward)
        names |= taken
        if not hands_on or kind.__module__.startswith("transformers."):
            break
    return frozenset(names)


@lru_cache(256)
def _taken_by(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Return the names that a function takes, and whether it takes any others."""
    found = inspect.signature(function).parameters
    return frozenset(found), any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found.values())


def cache_argument(model: nn.Module) -> str:
    """Return the name by which a stock model's `forward` takes its cache. UnsupportedModelError: it takes none."""
    name = cache_name(forward_parameters(model))
    if name is None:
        raise UnsupportedModelError(
            f"the forward of {type(model).__name__} names no cache among its parameters; name it, or extend a class of "
            "transformers whose forward does"
        )
    return name
