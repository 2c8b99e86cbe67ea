"""What it costs to roll a draft back and to commit, by the length of the context; it should not depend on it.

    python benchmarks/rollback.py

A cache as the embedded model's, filled to a length: a draft's tokens are written, and none of them is committed, or
those that were accepted. Beside it `DynamicCache.crop` of `transformers`, which cuts every layer and leaves it to the
next tokens to copy what stays, and copying the cache. Median of many, in microseconds.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from kept import RESULTS
from rich.progress import track
from transformers import DynamicCache

from selfspec.cache.shared_cache import SharedCache
from selfspec.environment import environment

_DEPTH, _HEADS, _HEAD_DIM = 12, 4, 32
_DRAFTED, _ACCEPTED = 4, 2
_CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=201)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = [_measured(context, options.repeats) for context in track(_CONTEXTS, "measuring", transient=True)]
    record = {"settings": vars(options), "environment": environment(torch.device("cpu")), "figures": figures}
    (RESULTS / "rollback.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / "rollback.md").write_text(_table(figures))
    print(_table(figures))


@torch.no_grad()
def _measured(context: int, repeats: int) -> dict[str, Any]:
    commits = min(repeats, 21)
    limit = context + _ACCEPTED * commits
    shared = SharedCache(_DEPTH, 1, limit=limit, slack=_DRAFTED, device=torch.device("cpu"))
    dynamic = DynamicCache()
    shared.reserve(limit)
    for cache in (shared, dynamic):
        _write(cache, context)
    shared.commit([context])
    rolled_back, committed, cropped = [], [], []
    for _ in range(repeats):
        _write(shared, _DRAFTED)
        rolled_back.append(_microseconds(lambda: shared.commit([0])))
    # Few, for each makes the context longer.
    for _ in range(commits):
        _write(shared, _DRAFTED)
        committed.append(_microseconds(lambda: shared.commit([_ACCEPTED])))
    for _ in range(min(repeats, 21)):
        _write(dynamic, _DRAFTED)
        cropped.append(_microseconds(lambda: dynamic.crop(-_DRAFTED)))
    copied = [_microseconds(lambda: copy.deepcopy(dynamic)) for _ in range(min(repeats, 21))]
    return {
        "context": context,
        "rollback": statistics.median(rolled_back),
        "commit": statistics.median(committed),
        "crop": statistics.median(cropped),
        "copy": statistics.median(copied),
    }


def _write(cache: SharedCache | DynamicCache, tokens: int) -> None:
    states = torch.zeros(1, _HEADS, tokens, _HEAD_DIM)
    for layer in range(_DEPTH):
        cache.update(states, states, layer)


def _microseconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - started)


def _table(figures: list[dict[str, Any]]) -> str:
    lines = [
        "| context, tokens | rollback, µs | commit, µs | transformers' crop, µs | a copy of the cache, µs |",
        "|---|---|---|---|---|",
    ]
    for each in figures:
        cells = [f"{each[what]:.1f}" for what in ("rollback", "commit")]
        cells += [f"{each[what]:.0f}" for what in ("crop", "copy")]
        lines.append(f"| {each['context']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
