"""Say up to how many rows the kernels' product is faster than torch's, by processor.

The product decides the last bits of a result, and a seed has to give the same tokens: so no clock chooses, but what
`benchmarks/few_rows.py` and times of prompts by their length showed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from selfspec.device import device_name
from selfspec.kernels import native

_WIDE = 2048


@dataclass(frozen=True)
class Crossover:
    """Holds the most rows for which the kernels' product is the faster one.

    Attributes:
        narrow: with weights of up to 2,048 inputs.
        wide: with more.
        bfloat16: with weights in bfloat16, for which torch uses instructions of its own at more rows, where there are
            some.
        float16: with weights in float16, the same.
    """

    narrow: int
    wide: int
    bfloat16: int
    float16: int

    def rows(self, dtype: torch.dtype, inputs: int) -> int:
        """Return the most rows for weights of a dtype and a number of inputs; `MOST_ROWS`: any number."""
        if dtype.itemsize == 2:
            return self.bfloat16 if dtype == torch.bfloat16 else self.float16
        return self.wide if inputs > _WIDE else self.narrow


@cache
def crossover() -> Crossover:
    """Return those of this machine's processor."""
    library, is_amd = native.library(), device_name(torch.device("cpu")).startswith("AMD")
    variant = "none" if library is None else library.variant
    if variant == "v3":
        # Without AVX-512 torch multiplies numbers of 16 bits one by one.
        return Crossover(64 if is_amd else 16, 32 if is_amd else 16, native.MOST_ROWS, native.MOST_ROWS)
    if variant not in ("vnni", "v4"):
        return Crossover(16, 16, 10, 10)
    narrow, wide = (native.MOST_ROWS, 128) if is_amd else (48, 48)
    return Crossover(narrow, wide, 10, native.MOST_ROWS)
