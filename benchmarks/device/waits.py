"""How often a round waits for the device, and what the device does in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from device.figure import Figure, Rows, lacking
from device.profiling import counted_waits, profiled
from device.runtimes import runtime
from device.stage import Bench, Case
from torch import Tensor

from selfspec.api import SelfSpeculative, wrap
from selfspec.decode.generation import Generation
from selfspec.draft.registry import PLAIN, parse_draft
from selfspec.measure.prompts import built_in
from selfspec.measure.stock import bare
from selfspec.runtime.named import RuntimeName
from selfspec.runtime.timer import Timer

_NO_DEVICE = "there is no device to wait for on a CPU"
_LENGTH = 3
# Texts long enough that programs of every kind are made and proved, and that no round is the last.
_WARM_UPS, _ROUNDS, _TOKENS = 2, 16, 192
_BY_MODE = "waits a round"
_BY_PROFILER = ("synchronisations", "copies to the host", "launches", "device busy")


@dataclass(frozen=True)
class _Wanted:
    """What one case counts: `length` is None for the default control."""

    runtime: RuntimeName
    draft: str
    length: int | None
    temperature: float

    @property
    def name(self) -> str:
        control = (
            "" if self.draft == PLAIN else ", default control" if self.length is None else f", {self.length} tokens"
        )
        return f"{self.runtime}, {self.draft}{control}, {'sampled' if self.temperature else 'greedy'}"


def wait_cases(bench: Bench) -> Iterator[Case]:
    """Plain decoding and drafts of fixed and of changing length, by stock modules and by graphs."""
    exit_ = f"exit:{bench.models.exit_layer('1B', 1 / 3)}"
    drafts = [(PLAIN, None), (exit_, _LENGTH), (exit_, None), ("int8", _LENGTH), ("lookup", _LENGTH)]
    for by in (RuntimeName.EAGER, RuntimeName.TRACED, RuntimeName.GRAPHS):
        for draft, length in drafts:
            for temperature in (0.0, 0.8):
                wanted = _Wanted(by, draft, length, temperature)
                yield Case(wanted.name, partial(_counted, bench, wanted))


def _counted(bench: Bench, wanted: _Wanted) -> Rows:
    checkpoint = bench.models.trained("1B")
    warm_ups, rounds, tokens = (1, 2, 32) if bench.miniature else (_WARM_UPS, _ROUNDS, _TOKENS)
    spec = wrap(
        bare(checkpoint.model),
        parse_draft(wanted.draft),
        draft_length=wanted.length,
        runtime=runtime(wanted.runtime),
    )
    prompts = built_in().prompts(checkpoint.tokenizer, 1, 1, 8 if bench.miniature else 128)[0].to(bench.device)

    def begun() -> Generation:
        return _begun(spec, prompts, tokens, wanted.temperature)

    for _ in range(warm_ups):
        begun().finish()
    timer = Timer(time.perf_counter, bench.device)
    generation, drafted = _after_one(begun()), []
    seconds = [timer.of(lambda: drafted.append(float(len(next(generation).rows[0].draft)))) for _ in range(rounds)]
    generation.close()
    figures = {
        "a round": Figure.of([1000 * each for each in seconds], "ms"),
        "drafted": Figure.of(drafted, "tokens"),
    }
    if bench.device.type != "cuda":
        return {"": figures | dict.fromkeys((_BY_MODE, *_BY_PROFILER), Figure(cannot=_NO_DEVICE))}
    return {"": figures | counts(begun, rounds)}


def counts(begun: Callable[[], Generation], rounds: int) -> dict[str, Figure]:
    """What the device and its driver do in some rounds of generations that begin alike."""
    generation = _after_one(begun())
    waits = [float(_waits(generation)) for _ in range(rounds)]
    generation.close()
    return {_BY_MODE: Figure.of(waits, ""), **_profiled(_after_one(begun()), rounds)}


def _after_one(generation: Generation) -> Generation:
    """The first round also makes room, and programs where memory has moved."""
    next(generation)
    return generation


def _waits(generation: Generation) -> int:
    with counted_waits() as found:
        next(generation)
    return found.count


def _begun(spec: SelfSpeculative, prompts: Tensor, tokens: int, temperature: float) -> Generation:
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": 0} if temperature else {}
    return spec.stream(
        prompts,
        torch.ones_like(prompts),
        max_new_tokens=tokens,
        do_sample=temperature > 0,
        eos_token_id=None,
        seed=1,
        **sampling,
    )


def _profiled(generation: Generation, rounds: int) -> dict[str, Figure]:
    """What the profiler sees in some rounds; it may not work on a device that all else works on."""
    try:
        found = profiled(lambda: [next(generation) for _ in range(rounds)])
    except RuntimeError as error:
        return dict.fromkeys(_BY_PROFILER, lacking(error))
    finally:
        generation.close()
    return {
        "synchronisations": Figure.number(found.synchronisations / rounds),
        "copies to the host": Figure.number(found.copies_to_host / rounds),
        "launches": Figure.number(found.launches / rounds),
        "device busy": Figure.number(1000 * found.busy_seconds / rounds, "ms"),
    }
