"""The stages: texts and waits of drafts, pieces of a pass, and captures."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from logging import getLogger
from logging.handlers import BufferingHandler
from typing import Any
from unittest import mock

import torch
from device.kit import CANNOT, FAILED, Bench, Rows, Stage
from device.products import NO_TRITON, piece_cases, row_cases
from harness import equal_tokens, sampling

from selfspec.api import wrap
from selfspec.control import Control, CostAware, FixedLength
from selfspec.decode.generation import Generation
from selfspec.device import HostCopy, Timer
from selfspec.draft import Drafter
from selfspec.draft.registry import PLAIN, parse_draft
from selfspec.kernels import trial
from selfspec.measure.estimate import Estimate
from selfspec.measure.prompts import built_in
from selfspec.measure.stock import bare
from selfspec.runtime.cuda_graphs import Launch, Recorder, Recording
from selfspec.tools.lab.arms import RUNTIMES, runtime_named

Cases = dict[str, Callable[[], Rows]]

_BY = ("eager", "graphs")
# A head of random weights, shaped as one of EAGLE's.
_EAGLE = "eagle"
_CHAIN, _TREE = FixedLength(3), FixedLength(3, nodes=7)
_DRAFTS = {
    "plain": (PLAIN, _CHAIN),
    "exit": ("exit:2", _CHAIN),
    "tree along an exit": ("exit:2", _TREE),
    "int8": ("int8", _CHAIN),
    "int4": ("int4", _CHAIN),
    "look-ups": ("lookup", _CHAIN),
    "recycled tokens": ("recycle", _TREE),
}
_NOT_COUNTED = CANNOT + "torch counts waits and work of a CUDA device alone; on a CPU there is nothing to wait for"
# What torch says of each operation that waits, while it is asked to.
_WAITS = "called a synchronizing CUDA operation"


def first_cases(bench: Bench) -> Cases:
    """Return each draft by stock modules and by graphs."""
    return {f"{by}, {name}": partial(_seen, bench, by, name) for by, name in product(_BY, _DRAFTS)}


def _seen(bench: Bench, by: str, name: str) -> Rows:
    """Compare texts of a draft with plain decoding's, of the small trained model in float32; count waits of a round."""
    heard, logger = BufferingHandler(100), getLogger(trial.__name__)
    logger.addHandler(heard)
    try:
        figures = _written(bench, by, name)
    finally:
        logger.removeHandler(heard)
    kernels = "trusted" if trial.runs_triton(bench.device) else NO_TRITON
    said = [record.getMessage() for record in heard.buffer]
    return {"": {**figures, "kernels in Triton": FAILED + "; ".join(said) if said else kernels}}


def _written(bench: Bench, by: str, name: str) -> dict[str, Estimate | float | str]:
    checkpoint = bench.models.small("float32")
    model, (draft, length) = bare(checkpoint.model), _DRAFTS[name]
    context, tokens, rounds = (8, 12, 2) if bench.miniature else (64, 96, 12)
    prompts = built_in().prompts(checkpoint.tokenizer, 3, 3, context)[0].to(bench.device)
    given: dict[str, Any] = {"max_new_tokens": tokens, "eos_token_id": None}
    mask = torch.ones_like(prompts)
    spec = wrap(model, parse_draft(draft), draft_length=length, accept="coupled", runtime=runtime_named(by, after=0))

    def begun() -> Generation:
        return spec.stream(prompts, mask, **given, **sampling(0.0))

    wanted = model.generate(prompts, attention_mask=mask, pad_token_id=0, **given, **sampling(0.0))
    # The second time programs run that were proved the first time.
    greedy = [begun().finish().sequences for _ in range(2)][-1]
    sampled, plain = (
        each.generate(prompts, mask, seed=1, **given, **sampling(0.8)).sequences
        for each in (spec, wrap(model, None, accept="coupled"))
    )
    waits = waits_of_rounds(begun, rounds) if bench.device.type == "cuda" else _NOT_COUNTED
    proved = len(spec.programs.proved)
    # Miniature texts end too soon.
    missed = spec.runtime.after is not None and not proved and not bench.miniature
    ran = FAILED + "no kind of pass ran by a program" if missed else float(proved)
    compared = {"greedy text": _compared(greedy, wanted), "sampled text": _compared(sampled, plain)}
    return {**compared, "waits a round": waits, "kinds by programs": ran}


def _compared(found: torch.Tensor, wanted: torch.Tensor) -> str:
    for row, (text, other) in enumerate(zip(found.tolist(), wanted.tolist(), strict=True)):
        alike = equal_tokens(text, other)
        if alike < len(other):
            return f"{FAILED}row {row} is another text from its token {alike} on"
    return "EQUAL"


def waits_of_rounds(begun: Callable[[], Generation], rounds: int) -> Estimate:
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
    return Estimate.of_median(found)


def idle_share(begun: Callable[[], Generation], rounds: int) -> float:
    """Return the share of rounds after the first in which a CUDA device runs nothing; to note that takes time, too."""
    generation, timer = begun(), Timer(time.perf_counter, torch.device("cuda"))
    next(generation)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        seconds = timer.of(lambda: [next(generation) for _ in range(rounds)])
    generation.close()
    busy = sum(each.self_device_time_total for each in seen.key_averages()) / 1e6
    return float(max(0.0, 1.0 - busy / seconds))


def host_milliseconds(begun: Callable[[], Generation], rounds: int) -> Estimate:
    """Time what the host does in rounds after the first, beside its waits for values of a device."""
    generation, read, waited, found = begun(), HostCopy.read, [0.0], []
    next(generation)

    def timed(copy: HostCopy) -> torch.Tensor:
        began = time.perf_counter()
        values = read(copy)
        waited[0] += time.perf_counter() - began
        return values

    with mock.patch.object(HostCopy, "read", timed):
        for _ in range(rounds):
            waited[0], began = 0.0, time.perf_counter()
            next(generation)
            found.append(1000 * (time.perf_counter() - began - waited[0]))
    generation.close()
    return Estimate.of_median(found)


def wait_cases(bench: Bench) -> Cases:
    """Return plain decoding and drafts of fixed and of changing length, by stock modules and graphs."""
    exit_ = f"exit:{bench.models.exit_layer('1B', 1 / 3)}"
    drafts = [(PLAIN, None), (exit_, 3), (exit_, None), ("int8", 3), ("lookup", 3), (_EAGLE, 3)]
    cases: Cases = {}
    for by, (draft, length), temperature in product(_BY, drafts, (0.0, 0.8)):
        how = "" if draft == PLAIN else f", {f'{length} tokens' if length else 'default control'}"
        name = f"{by}, {draft}{how}, {'sampled' if temperature else 'greedy'}"
        cases[name] = partial(_counted, bench, by, draft, length, temperature)
    return cases


def _counted(bench: Bench, by: str, draft: str, length: int | None, temperature: float) -> Rows:
    checkpoint = bench.models.trained("1B")
    # Texts long enough that programs of every kind are made and proved, and that no round is the last.
    warm_ups, rounds, tokens = (1, 2, 24) if bench.miniature else (2, 16, 192)
    how = {"draft_length": length, "runtime": runtime_named(by, after=0)}
    spec = wrap(bare(checkpoint.model), _drafter(bench, draft), **how)  # type: ignore[arg-type]
    prompts = _prompts(bench, checkpoint.tokenizer)
    options: dict[str, Any] = {"max_new_tokens": tokens, "eos_token_id": None, "seed": 1}

    def begun() -> Generation:
        return spec.stream(prompts, torch.ones_like(prompts), **options, **sampling(temperature))

    for _ in range(warm_ups):
        begun().finish()
    timer, drafted = Timer(time.perf_counter, bench.device), list[float]()
    generation = begun()
    # The first round also makes room, and programs where memory has moved.
    next(generation)
    seconds = [timer.of(lambda: drafted.append(float(len(next(generation).rows[0].draft)))) for _ in range(rounds)]
    generation.close()
    on_cuda = bench.device.type == "cuda"
    return {
        "": {
            "a round, ms": Estimate.of_median([1000 * each for each in seconds]),
            "drafted": Estimate.of_median(drafted),
            "of the host, ms": host_milliseconds(begun, rounds) if on_cuda else _NOT_COUNTED,
            "waits a round": waits_of_rounds(begun, rounds) if on_cuda else _NOT_COUNTED,
            "idle share": idle_share(begun, rounds) if on_cuda else _NOT_COUNTED,
        }
    }


def _drafter(bench: Bench, name: str) -> Drafter | None:
    return parse_draft(f"eagle:{bench.models.eagle('1B')}" if name == _EAGLE else name)


def _prompts(bench: Bench, tokenizer: Any) -> torch.Tensor:
    return built_in().prompts(tokenizer, 1, 1, 8 if bench.miniature else 128)[0].to(bench.device)


def capture_cases(bench: Bench) -> Cases:
    """Return generations of which later ones should capture nothing: plain, chains, look-ups, trees and a head's."""
    exit_ = f"exit:{bench.models.exit_layer('1B', 1 / 3)}"
    drafts: list[tuple[str, Control]] = [(PLAIN, CostAware()), ("int8", CostAware()), ("lookup", CostAware())]
    drafts += [(exit_, FixedLength(4, nodes=64)), (_EAGLE, FixedLength(4, nodes=64))]
    return {f"{draft}, {control}": partial(_captured, bench, draft, control) for draft, control in drafts}


def _captured(bench: Bench, draft: str, control: Control) -> Rows:
    checkpoint, captures = bench.models.trained("1B"), list[float]()
    kind: Any = RUNTIMES["graphs"]

    class Noting(kind):
        """Notes how long each capture takes."""

        def recorder(self, device: torch.device) -> Recorder:
            recorder: Recorder = super().recorder(device)
            record = recorder.record

            def noted(launch: Launch) -> Recording:
                began = time.perf_counter()
                recording = record(launch)
                captures.append(time.perf_counter() - began)
                return recording

            recorder.record = noted  # type: ignore[method-assign]
            return recorder

    spec = wrap(bare(checkpoint.model), _drafter(bench, draft), draft_length=control, runtime=Noting())
    prompts, rows = _prompts(bench, checkpoint.tokenizer), {}
    for number, length in enumerate((24, 24) if bench.miniature else (64, 256, 64, 256), 1):
        before, began = len(captures), time.perf_counter()
        options: dict[str, Any] = {"max_new_tokens": length, "eos_token_id": None, "do_sample": False}
        spec.generate(prompts, torch.ones_like(prompts), **options)
        rows[f"generation {number}, {length} tokens"] = {
            "captures": float(len(captures) - before),
            "captures, s": sum(captures[before:]),
            "whole, s": time.perf_counter() - began,
        }
    return rows


STAGES = {
    "first": Stage("Whether drafts give the text of plain decoding, and how often a round waits", 2, first_cases),
    "pieces": Stage("Products in fewer bits, attention of blocks, and over lengths that are new", 1, piece_cases),
    "waits": Stage("How often a round waits for the device, how long it takes, and its idle share", 4, wait_cases),
    "rows": Stage("Layers over few rows on a CPU, by torch and by selfspec's view of them", 2, row_cases, on_cpus=True),
    "captures": Stage("How many passes each generation captures, and how long that takes", 2, capture_cases),
}
"""All stages, in the order in which they run."""
