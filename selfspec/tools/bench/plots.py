"""The plots, made from the results: speed by arm, acceptance by depth, predicted against measured speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec.decode.stats import Stats
from selfspec.errors import BenchError
from selfspec.files.writing import whole
from selfspec.tools.bench import figures
from selfspec.tools.bench.arm import ArmKind
from selfspec.tools.bench.prediction import prediction
from selfspec.tools.bench.record import Record
from selfspec.tools.bench.results_file import MeasuredCell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEPT = "the results are kept: make room and repeat the command"
"""What messages say of a report that cannot be written."""

SPEED, ACCEPTANCE, PREDICTION = "speed.png", "acceptance.png", "prediction.png"

# The qualitative palette of Okabe and Ito (2008), which the colour-blind can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933", "#882255")
_MARKERS = "osD^vP*Xh"
# Of fewer draft tokens a share says little.
_ENOUGH = 10
_WIDTH = 5.2
_DPI = 130


def require_packages() -> None:
    """Refuse before work starts what could not be drawn.

    Raises:
        BenchError: naming the package that is missing and how to get it.
    """
    if find_spec("matplotlib") is None:
        raise BenchError("the plots of a benchmark need matplotlib; pip install 'selfspec[bench]', or give --no-plots")


def draw(cells: Sequence[MeasuredCell], folder: Path) -> list[str]:
    """Draw what there are results for.

    Args:
        cells: at least one.
        folder: where the files go.

    Returns:
        The names of the files.
    """
    from matplotlib import rc_context

    # Names may hold dollar signs.
    with rc_context({"text.parse_math": False}):
        drawn = {SPEED: _speed(cells), ACCEPTANCE: _acceptance(cells), PREDICTION: _prediction(cells)}
        for name, figure in drawn.items():
            if figure is not None:
                with whole(folder / name, KEPT) as draft:
                    figure.savefig(draft, dpi=_DPI)
            else:
                (folder / name).unlink(missing_ok=True)
    return [name for name, figure in drawn.items() if figure is not None]


def _speed(cells: Sequence[MeasuredCell]) -> Figure:
    names = list(dict.fromkeys(record.arm.name for measured in cells for record in measured.arms))
    figure, panels = _panels(len(cells), height=0.9 + 0.3 * len(names), shared=True)
    for panel, measured in zip(panels, cells, strict=True):
        panel.set_title(_title(measured), fontsize=9)
        panel.axvline(1, color="#888888", linewidth=0.8)
        reference = next(iter(measured.arms))
        for record in measured.arms:
            if not record.scored or not reference.scored:
                continue
            found = figures.ratio(record, reference, figures.decoding)
            own = record.arm.kind in (ArmKind.PLAIN, ArmKind.DRAFT)
            panel.errorbar(
                found.value,
                names.index(record.arm.name),
                xerr=[[found.value - found.low], [found.high - found.value]],
                fmt="o" if own else "s",
                color=_COLOURS[0] if own else _COLOURS[1],
                capsize=3,
                markersize=5,
            )
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.set_xlim(left=0)
        panel.grid(axis="x", alpha=0.3)
        panel.set_xlabel("decoding speed against model.generate", fontsize=8)
    return figure


def _acceptance(cells: Sequence[MeasuredCell]) -> Figure | None:
    drafting = [measured for measured in cells if any(_drafts(record) for record in measured.arms)]
    if not drafting:
        return None
    names = list(dict.fromkeys(each.arm.name for measured in drafting for each in measured.arms if _drafts(each)))
    figure, panels = _panels(len(drafting), height=3.2, shared=True)
    for panel, measured in zip(panels, drafting, strict=True):
        panel.set_title(_title(measured), fontsize=9)
        for record in measured.arms:
            if record.counts is None or not _drafts(record):
                continue
            shares = _steady(record.counts)
            style = names.index(record.arm.name)
            panel.plot(
                range(1, len(shares) + 1),
                shares,
                marker=_MARKERS[style % len(_MARKERS)],
                color=_COLOURS[style % len(_COLOURS)],
                linewidth=1.2,
                markersize=5,
                label=record.arm.name,
            )
        panel.set_ylim(0, 1.02)
        panel.locator_params(axis="x", integer=True)
        panel.set_xlabel(f"depth in the draft, where at least {_ENOUGH} were judged", fontsize=8)
        panel.set_ylabel("share accepted of those judged", fontsize=8)
        panel.grid(alpha=0.3)
    named = dict(each for panel in panels for each in zip(*panel.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(named.values(), named.keys(), fontsize=8, loc="outside lower center", ncols=min(len(names), 4))
    return figure


def _prediction(cells: Sequence[MeasuredCell]) -> Figure | None:
    points = []
    for measured in cells:
        plain = next((record for record in measured.arms if record.arm.kind is ArmKind.PLAIN), None)
        found = [(record, prediction(record, plain)) for record in measured.arms if plain is not None and record.scored]
        points += [(record.arm.name, each) for record, each in found if each is not None]
    if not points:
        return None
    figure, (panel,) = _panels(1, height=4.6, shared=False)
    names = list(dict.fromkeys(name for name, _ in points))
    furthest = 1.08 * max(max(each.predicted, each.measured.high) for _, each in points)
    panel.plot([0, furthest], [0, furthest], color="#888888", linewidth=0.8)
    panel.plot([0, furthest], [0, 0.9 * furthest], color="#888888", linewidth=0.8, linestyle="--")
    for style, name in enumerate(names):
        own = [each for other, each in points if other == name]
        medians = [each.measured.value for each in own]
        panel.errorbar(
            [each.predicted for each in own],
            medians,
            yerr=[
                [each.measured.value - each.measured.low for each in own],
                [each.measured.high - each.measured.value for each in own],
            ],
            fmt=_MARKERS[style % len(_MARKERS)],
            color=_COLOURS[style % len(_COLOURS)],
            capsize=2,
            markersize=5,
            label=name,
        )
    panel.set_xlim(0, furthest)
    panel.set_ylim(0, furthest)
    panel.set_xlabel("speed-up over plain decoding, predicted from c and V", fontsize=8)
    panel.set_ylabel("measured", fontsize=8)
    panel.set_title("each point a cell; lines: efficiency 1 and 0.9", fontsize=9)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7, loc="upper left")
    return figure


def _panels(number: int, height: float, shared: bool) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, up to three beside one another."""
    # Not pyplot: it keeps state of its own, and asks for a display.
    from matplotlib.figure import Figure

    across = min(number, 3)
    down = -(-number // across)
    names = 2.6 if shared else 0.0
    figure = Figure(
        figsize=(names + _WIDTH * across * (0.75 if across > 1 else 1), height * down), layout="constrained"
    )
    panels: list[Axes] = list(figure.subplots(down, across, squeeze=False, sharey=shared).flat)
    for panel in panels[number:]:
        panel.set_visible(False)
    for panel in panels:
        panel.tick_params(labelsize=8)
    return figure, panels[:number]


def _steady(counts: Stats) -> list[float]:
    """Acceptance at the first depths, as far as enough draft tokens were judged there to tell."""
    pairs = zip(counts.accepted_per_depth, counts.judged_per_depth, strict=True)
    return [accepted / judged for accepted, judged in takewhile(lambda pair: pair[1] >= _ENOUGH, pairs)]


def _drafts(record: Record) -> bool:
    return record.scored and record.counts is not None and bool(record.counts.judged_per_depth)


def _title(measured: MeasuredCell) -> str:
    cell = measured.cell
    return f"{cell.workload}, temperature {cell.temperature:g}\nbatch {cell.batch}, prompt of {cell.context} tokens"
