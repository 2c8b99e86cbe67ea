"""What differs between the supported versions of `transformers`, each difference in one place.

Since 5.24 every `forward` calls its cache `cache`; before, it was `past_key_values`, and `cache_params` in models of
states alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import transformers
from torch import nn
from transformers import Cache
from transformers.generation import GenerateDecoderOnlyOutput

NEWEST_TESTED = {"torch": "2.15", "transformers": "5.24"}
"""The newest minor release of each that the tests have run on; one more is accepted, and `doctor` says so."""

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names that arguments of stock models have for the cache."""

CACHE_LENGTH_NAMES = ("cache_length", "past_key_values_length")
"""Names that arguments of modules which embed positions have for the length of the cache."""


def cache_name(names: Iterable[str]) -> str | None:
    """Return the name of the cache among names of arguments; None: there is none."""
    given = frozenset(names)
    return next((name for name in CACHE_NAMES if name in given), None)


OUTPUT_CACHE = next(field.name for field in fields(GenerateDecoderOnlyOutput) if field.name in CACHE_NAMES)
"""What `model.generate` calls the cache that it returns."""


OLDER_THAN_5_21 = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21)
"""Whether there are types that are built or run wrongly; `adapters/refused.py` names them."""


RENAMED_CACHE = OUTPUT_CACHE == "cache"
"""Whether this is 5.24 or newer."""


def cache_argument(model: nn.Module) -> str:
    """Return the name by which the `forward` of a stock model takes its cache.

    Raises:
        TypeError: it takes none.
    """
    name = cache_name(inspect.signature(type(model).forward).parameters)
    if name is None:
        raise TypeError(f"the forward of {type(model).__name__} takes no cache")
    return name


def over_cache(model: nn.Module, cache: Cache) -> dict[str, Any]:
    """Return the arguments by which a stock model reads and extends a cache of `transformers`."""
    return {cache_argument(model): cache, "use_cache": True}
