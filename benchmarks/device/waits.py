"""Count the waits of a round for the device, and time it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from device.figure import Figure, Rows
from device.stage import Bench, Case
from harness import sampling

from selfspec.api import wrap
from selfspec.decode.generation import Generation
from selfspec.device import Timer
from selfspec.draft.registry import PLAIN, parse_draft
from selfspec.measure.prompts import built_in
from selfspec.measure.stock import bare
from selfspec.tools.lab.arms import RuntimeName, runtime_named

_LENGTH = 3
# Texts long enough that programs of every kind are made and proved, and that no round is the last.
_WARM_UPS, _ROUNDS, _TOKENS = 2, 16, 192
NOT_COUNTED = "torch counts waits for a CUDA device alone; on a CPU there is nothing to wait for"
"""Why there is no figure of waits."""

# What torch says of each operation that waits, while it is asked to.
_WAITS = "called a synchronizing CUDA operation"


@dataclass(frozen=True)
class _Wanted:
    """Settings of one case: `length` is None for the default control."""

    runtime: RuntimeName
    draft: str
    length: int | None
    temperature: float

    @property
    def name(self) -> str:
        control = "default control" if self.length is None else f"{self.length} tokens"
        drafted = self.draft if self.draft == PLAIN else f"{self.draft}, {control}"
        return f"{self.runtime}, {drafted}, {'sampled' if self.temperature else 'greedy'}"


def wait_cases(bench: Bench) -> Iterator[Case]:
    """Yield plain decoding and drafts of fixed and of changing length, by stock modules and graphs."""
    exit_ = f"exit:{bench.models.exit_layer('1B', 1 / 3)}"
    drafts = [(PLAIN, None), (exit_, _LENGTH), (exit_, None), ("int8", _LENGTH), ("lookup", _LENGTH)]
    for by in (RuntimeName.EAGER, RuntimeName.GRAPHS):
        for draft, length in drafts:
            for temperature in (0.0, 0.8):
                wanted = _Wanted(by, draft, length, temperature)
                yield Case(wanted.name, partial(_counted, bench, wanted))


def _counted(bench: Bench, wanted: _Wanted) -> Rows:
    checkpoint = bench.models.trained("1B")
    warm_ups, rounds, tokens = (1, 2, 24) if bench.miniature else (_WARM_UPS, _ROUNDS, _TOKENS)
    spec = wrap(
        bare(checkpoint.model),
        parse_draft(wanted.draft),
        draft_length=wanted.length,
        runtime=runtime_named(wanted.runtime, after=0),
    )
    prompts = built_in().prompts(checkpoint.tokenizer, 1, 1, 8 if bench.miniature else 128)[0].to(bench.device)
    options: dict[str, Any] = {"max_new_tokens": tokens, "eos_token_id": None, "seed": 1}

    def begun() -> Generation:
        return spec.stream(prompts, torch.ones_like(prompts), **options, **sampling(wanted.temperature))

    for _ in range(warm_ups):
        begun().finish()
    timer = Timer(time.perf_counter, bench.device)
    generation, drafted = begun(), []
    # The first round also makes room, and programs where memory has moved.
    next(generation)
    seconds = [timer.of(lambda: drafted.append(float(len(next(generation).rows[0].draft)))) for _ in range(rounds)]
    generation.close()
    waits = Figure(cannot=NOT_COUNTED)
    if bench.device.type == "cuda":
        waits = waits_of_rounds(begun, rounds)
    milliseconds = Figure.of([1000 * each for each in seconds], "ms")
    return {"": {"a round": milliseconds, "drafted": Figure.of(drafted, "tokens"), "waits a round": waits}}


def waits_of_rounds(begun: Callable[[], Generation], rounds: int) -> Figure:
    """Count how often rounds after the first wait for a CUDA device.

    Torch's debug mode for synchronisation sees operations that wait by themselves: values read, and copies to and from
    pageable memory. It does not see calls of `synchronize`. Mode and warning filters are those of the process, so
    nothing else may run meanwhile.
    """
    generation, before, found = begun(), torch.cuda.get_sync_debug_mode(), []
    next(generation)
    for _ in range(rounds):
        with warnings.catch_warnings(record=True) as seen:
            # The mode warns of itself, too, when it is first used.
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                next(generation)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        found.append(float(sum(_WAITS in str(each.message) for each in seen)))
    generation.close()
    return Figure.of(found, "")
