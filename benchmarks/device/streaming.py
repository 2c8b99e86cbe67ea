"""More model than memory on a device: weights that come from the host, drafts that stay, and what they reach."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from device.figure import Figure, Rows
from device.models import free_memory
from device.stage import Bench, Case
from torch import Tensor

import selfspec
from selfspec.measure.prompts import built_in
from selfspec.placement.device_copies import CudaCopies, DeviceCopies
from selfspec.placement.drafts import placement_of
from selfspec.placement.place import default_draft, place
from selfspec.placement.plan import Plan
from selfspec.placement.planned import PlannedCheckpoint, plan_checkpoint
from selfspec.placement.weight_source import FromHost
from selfspec.placement.weight_stream import WeightStream
from selfspec.runtime.named import RuntimeName, runtime_named

_SHAPE = "8B"
_BUDGET = 8 * 10**9
_REPEATS = 3
_MIB = 2**20


@dataclass(frozen=True)
class _Arm:
    """A way to decode.

    Attributes:
        draft: whether rounded copies draft.
        runtime: of the passes.
        tokens: new ones in each text.
        cache: how keys and values are kept.
    """

    draft: bool
    runtime: RuntimeName
    tokens: int
    cache: str = "exact"


_ARMS = {
    "plain": _Arm(False, RuntimeName.EAGER, 8),
    "default drafts": _Arm(True, RuntimeName.EAGER, 96),
    "default drafts, traced": _Arm(True, RuntimeName.TRACED, 128),
    "default drafts, graphs": _Arm(True, RuntimeName.GRAPHS, 128),
    "default drafts, cache on the host": _Arm(True, RuntimeName.EAGER, 64, "host"),
    "default drafts, cache in 8 bits": _Arm(True, RuntimeName.EAGER, 64, "int8"),
}


class CopiesAtOnce(DeviceCopies):
    """What stands in for copies to a device where there is none."""

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def release(self, memory: Tensor) -> None:
        return

    def device_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def copy(self, to: Tensor, source: Tensor, after: Any) -> Any:
        return to.copy_(source)

    def wait_for(self, copied: Any) -> None:
        return

    def computed(self) -> Any:
        return None

    def finish(self) -> None:
        return

    def device_bytes(self) -> int:
        return 2**50


def streaming_cases(bench: Bench) -> Iterator[Case]:
    """Each arm by itself, greedily and at temperature 0.8."""
    for name, arm in _ARMS.items():
        yield Case(name, partial(_measured, bench, arm))


def _measured(bench: Bench, arm: _Arm) -> Rows:
    texts = built_in().prompts(bench.models.small().tokenizer, 1, 1, 8 if bench.miniature else 64)
    device = bench.device
    prompt = next(iter(texts))[0].reshape(1, -1).to(device)
    folder = bench.models.folder(_SHAPE)
    source = FromHost(CudaCopies(device) if device.type == "cuda" else CopiesAtOnce(device))
    free_memory()
    before = 0
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    planned = _planned(folder, arm, bench, source)
    model = place(planned.survey, planned.plan)
    placement = placement_of(model)
    assert placement is not None
    assert placement.stream is not None
    draft = default_draft(planned.plan) if arm.draft else None
    spec = selfspec.wrap(model, draft, runtime=runtime_named(arm.runtime))
    rows: dict[str, dict[str, Figure]] = {}
    for temperature in (0.0, 0.8):
        name = f"T {temperature:g}" if temperature else "greedy"
        rows[name] = _decoded(spec, placement.stream, planned.plan, prompt, arm, temperature, bench.miniature)
    rows["greedy"]["text"] = _compared(spec, prompt, arm, bench.miniature)
    return {**rows, "all": _sizes(planned, device, before)}


def _planned(folder: str, arm: _Arm, bench: Bench, source: FromHost) -> PlannedCheckpoint:
    context = 512
    if bench.miniature:
        # Nearly all fits: some of it is streamed.
        all_ = plan_checkpoint(folder, 2**50, None, False, context, source, arm.cache).plan.total
        return plan_checkpoint(folder, all_ - 1, None, arm.draft, context, source, arm.cache)
    return plan_checkpoint(folder, _BUDGET, None, arm.draft, context, source, arm.cache)


def _decoded(
    spec: selfspec.SelfSpeculative,
    stream: WeightStream,
    plan: Plan,
    prompt: Tensor,
    arm: _Arm,
    temperature: float,
    miniature: bool,
) -> dict[str, Figure]:
    """Tokens a second after the first round, and what the device was sent for each."""
    # More than one round: the first is not timed.
    tokens = min(arm.tokens, 48) if miniature else arm.tokens
    options: dict[str, Any] = {"max_new_tokens": tokens, "eos_token_id": None, "do_sample": bool(temperature)}
    if temperature:
        options |= {"temperature": temperature, "top_k": 0}
    rates, moved, accepted = [], [], []
    # The first text prepares programs.
    for seed in range(1 + (1 if miniature else _REPEATS)):
        generation = spec.stream(prompt, torch.ones_like(prompt), seed=seed, **options)
        first = len(next(generation).rows[0].tokens)
        _finish(prompt.device)
        begun, sent, made, rounds = time.perf_counter(), stream.bytes_moved, 0, 0
        for chunk in generation:
            made += len(chunk.rows[0].tokens)
            rounds += 1
        _finish(prompt.device)
        if seed and made:
            rates.append(made / (time.perf_counter() - begun))
            moved.append((stream.bytes_moved - sent) / made)
            accepted.append(made / rounds)
        assert first + made == tokens
    predicted = plan.drafting if arm.draft else plan.plain
    return {
        "tokens/s": Figure.of(rates, "tokens/s"),
        "predicted": Figure.number(predicted, "tokens/s"),
        "tokens a round": Figure.of(accepted, ""),
        "moved a token": Figure.number(statistics.median(moved) / _MIB, "MiB"),
    }


def _compared(spec: selfspec.SelfSpeculative, prompt: Tensor, arm: _Arm, miniature: bool) -> Figure:
    """How far the greedy text is that of plain decoding by the same weights and cache."""
    tokens = 4 if miniature else 8
    options: dict[str, Any] = {"max_new_tokens": tokens, "eos_token_id": None, "do_sample": False}
    mask, arms = torch.ones_like(prompt), (spec, spec.drafting(None))
    texts = [each.generate(prompt, mask, **options).sequences[0].tolist() for each in arms]
    alike = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=True)))) - prompt.shape[1]
    lossless = "" if arm.cache != "int8" else ", of a cache that is not lossless"
    return Figure(f"{alike} of {tokens} tokens are plain decoding's{lossless}")


def _sizes(planned: PlannedCheckpoint, device: torch.device, before: int) -> dict[str, Figure]:
    plan = planned.plan
    found = {
        "streamed": Figure.number(plan.streamed / _MIB, "MiB"),
        "layers that stay": Figure.number(plan.resident),
        "drafts": Figure("none" if plan.bits is None else f"{plan.bits} bits"),
        "from the host": Figure.number(plan.bandwidth.stream / 1e9, "GB/s"),
        "planned": Figure.number(plan.total / _MIB, "MiB"),
    }
    if device.type != "cuda":
        return {**found, "peak": Figure(cannot="a CPU has no memory of its own")}
    return {
        **found,
        "peak": Figure.number((torch.cuda.max_memory_allocated(device) - before) / _MIB, "MiB"),
        "reserved": Figure.number(torch.cuda.max_memory_reserved(device) / _MIB, "MiB"),
    }


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
