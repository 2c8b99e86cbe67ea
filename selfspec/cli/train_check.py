"""After a training: what its exits are worth by a short measurement, beside what their figures predict."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from selfspec.measure.estimate import Estimate
from selfspec.measure.prompts import BEGINNINGS
from selfspec.model.checkpoint import load_checkpoint
from selfspec.tools.bench.arms import ArmSpec, make_arm
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.race import race, scores

_NEW, _TEMPERATURE = 32, 0.8


@dataclass(frozen=True)
class CheckedExit:
    """An exit of a trained checkpoint, in times plain decoding.

    Attributes:
        draft: its name.
        predicted: from its acceptance rate on held-out text and the weights that it reads.
        greedy: measured, greedily.
        sampled: measured, at temperature 0.8.
    """

    draft: str
    predicted: float
    greedy: Estimate
    sampled: Estimate


def check_exits(folder: Path, device: str, figures: Mapping[str, float], seconds: float) -> list[CheckedExit]:
    """Decode with each exit that has figures, in turns with plain decoding, for some seconds."""
    layers = [int(name.removeprefix("speedup_")) for name in figures if name.startswith("speedup_")]
    checkpoint = load_checkpoint(str(folder), "auto", device)
    prompts = [checkpoint.encode(text)[:, :24] for text in BEGINNINGS]
    specs = [ArmSpec("plain"), *(ArmSpec("draft", f"exit:{layer}") for layer in layers)]
    arms = [make_arm(spec, checkpoint.model) for spec in specs]
    greedy, sampled = (Cell("check", temperature, 1, 24, _NEW) for temperature in (0.0, _TEMPERATURE))
    turns = race(arms, (greedy, sampled), prompts, time.perf_counter() + seconds, lambda: None)
    measured = zip(scores(turns, greedy)[1:], scores(turns, sampled)[1:], strict=True)
    return [
        CheckedExit(f"exit:{layer}", figures[f"speedup_{layer}"], first.speedup, second.speedup)
        for layer, (first, second) in zip(layers, measured, strict=True)
    ]


def verdict(checked: Sequence[CheckedExit], folder: Path) -> str:
    """What to do with the checkpoint."""
    best = max(checked, key=lambda each: each.sampled.value)
    said = f"greedy {best.greedy.shown(2)}, sampled {best.sampled.shown(2)}, predicted {best.predicted:.2f}"
    if max(best.greedy.value, best.sampled.value) <= 1:
        return (
            f"No exit beat plain decoding here; the best is {best.draft}: {said}. Train for longer or on more text, or "
            f"draft without training: --draft lookup+int8"
        )
    return (
        f"{best.draft} in times plain decoding: {said}. Choose by your own texts: selfspec calibrate {folder} "
        "--prompt-file FILE"
    )
