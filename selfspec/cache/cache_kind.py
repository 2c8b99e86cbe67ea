"""Ways to keep keys and values."""

from __future__ import annotations

from typing import Literal, get_args

CacheKind = Literal["exact", "host", "int8"]
"""`exact`: in the model's dtype, on its device. `host`: the same numbers, in memory of the host. `int8`: in 8 bits."""

CACHE_KINDS: tuple[CacheKind, ...] = get_args(CacheKind)
