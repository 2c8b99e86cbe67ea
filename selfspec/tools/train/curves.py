"""The curves of a training as a PNG: loss by step, and agreement of each exit with the full model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_curves(log: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the log of a training.

    Args:
        log: its points, each with its `step`.
        file: the PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot, which keeps figures for the whole process and may ask for a display.
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, exits = figure.subplots(1, 2)
    for name, label in (("loss", "training"), ("held_out_loss", "held out, full model")):
        _plot(losses, log, name, label)
    losses.set(xlabel="step", ylabel="nats a token", title="loss")
    for name in sorted({name for point in log for name in point if name.startswith("agreement_")}, key=_number):
        _plot(exits, log, name, f"exit {_number(name)}")
    exits.set(xlabel="step", ylabel="top-1 agreement", title="exits against the full model, held out")
    for axes in (losses, exits):
        if axes.lines:
            axes.legend()
    figure.savefig(file, dpi=120)


def _plot(axes: Any, log: Sequence[Mapping[str, Any]], name: str, label: str) -> None:
    points = {point["step"]: point[name] for point in log if name in point}
    if points:
        axes.plot(list(points), list(points.values()), marker="." if len(points) < 50 else "", label=label)


def _number(name: str) -> int:
    return int(name.rsplit("_", 1)[1])
