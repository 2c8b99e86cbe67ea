"""What tests of programs share: a clock by which every program proves itself, and generations at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from torch import Tensor

import selfspec


def ticking() -> Callable[[], float]:
    """A clock by which all things take the same time, and each reading a little less than the one before.

    So a program, timed after the stock modules, always takes less.
    """
    ticks: Iterator[int] = count(1)
    return lambda: 1.0 - 1.0 / next(ticks)


def greedy_together(
    spec: selfspec.SelfSpeculative, prompts: Sequence[Tensor], max_new_tokens: int
) -> list[list[list[int]]]:
    """Greedy texts of some prompts, each generated in a thread of its own."""

    def run(prompt: Tensor) -> list[list[int]]:
        tokens: list[list[int]] = spec.generate(
            prompt, max_new_tokens=max_new_tokens, do_sample=False
        ).sequences.tolist()
        return tokens

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(run, prompts))
