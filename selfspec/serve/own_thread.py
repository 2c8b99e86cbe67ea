"""Running passes in a thread that ends with them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Found = TypeVar("_Found")


def in_own_thread(work: Callable[[], _Found]) -> _Found:
    """Do some work in a new thread, and wait for it.

    OpenMP keeps a team of threads for each thread that has run a product, as long as that thread lives. Once all teams
    together have more threads than there are cores, each of them sleeps between two products, and waking it takes
    longer than a product of a small model. So while an engine runs, only its own thread should keep a team.
    """
    with ThreadPoolExecutor(1, "selfspec-passes") as thread:
        return thread.submit(work).result()
