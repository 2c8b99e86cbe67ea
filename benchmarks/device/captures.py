"""Count the passes that are captured in each generation, and time them: later generations should capture nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from device.figure import Figure, Rows
from device.stage import Bench, Case

from selfspec.api import wrap
from selfspec.control import Control, CostAware, FixedLength
from selfspec.draft.registry import PLAIN, parse_draft
from selfspec.measure.prompts import built_in
from selfspec.measure.stock import bare
from selfspec.runtime import CudaGraphs
from selfspec.runtime.cuda_graphs import Launch, Recorder, Recording
from selfspec.tools.lab.arms import RUNTIMES, RuntimeName

_LENGTHS = (64, 256, 64, 256)


def _noting(seconds: list[float]) -> CudaGraphs:
    """Make the runtime of graphs; note how long each capture takes."""
    kind: Any = RUNTIMES[RuntimeName.GRAPHS]

    class Noting(kind):
        def recorder(self, device: torch.device) -> Recorder:
            recorder: Recorder = super().recorder(device)
            record = recorder.record

            def noted(launch: Launch) -> Recording:
                began = time.perf_counter()
                recording = record(launch)
                seconds.append(time.perf_counter() - began)
                return recording

            recorder.record = noted  # type: ignore[method-assign]
            return recorder

    return Noting()


def capture_cases(bench: Bench) -> Iterator[Case]:
    """Yield plain decoding, chains under the default control, look-ups and trees."""
    exit_ = f"exit:{bench.models.exit_layer('1B', 1 / 3)}"
    drafts: list[tuple[str, Control]] = [(PLAIN, CostAware()), ("int8", CostAware()), ("lookup", CostAware())]
    for draft, control in [*drafts, (exit_, FixedLength(4, nodes=64))]:
        yield Case(f"{draft}, {control}", partial(_captured, bench, draft, control))


def _captured(bench: Bench, draft: str, control: Control) -> Rows:
    checkpoint, captures = bench.models.trained("1B"), list[float]()
    spec = wrap(bare(checkpoint.model), parse_draft(draft), draft_length=control, runtime=_noting(captures))
    prompts = built_in().prompts(checkpoint.tokenizer, 1, 1, 8 if bench.miniature else 128)[0].to(bench.device)
    options: dict[str, Any] = {"eos_token_id": None, "do_sample": False}
    rows: dict[str, dict[str, Figure]] = {}
    for number, length in enumerate((24, 24) if bench.miniature else _LENGTHS, 1):
        before, began = len(captures), time.perf_counter()
        spec.generate(prompts, torch.ones_like(prompts), max_new_tokens=length, **options)
        rows[f"generation {number}, {length} tokens"] = {
            "captures": Figure.number(float(len(captures) - before)),
            "seconds of captures": Figure.number(sum(captures[before:]), "s"),
            "seconds": Figure.number(time.perf_counter() - began, "s"),
        }
    return rows
