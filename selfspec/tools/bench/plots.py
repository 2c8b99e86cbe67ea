"""The plots, made from the results: speed by arm, and acceptance by depth."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.errors import BenchError
from selfspec.files.writing import whole
from selfspec.tools.bench.results import MeasuredCell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEPT = "the results are kept: make room and repeat the command"
"""What messages say of a report that cannot be written."""

SPEED, ACCEPTANCE = "speed.png", "acceptance.png"

# The qualitative palette of Okabe and Ito (2008), which the colour-blind can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933", "#882255")
_MARKERS = "osD^vP*Xh"
# Names may hold dollar signs.
_STYLE: dict[Any, Any] = {"text.parse_math": False, "font.size": 8, "grid.alpha": 0.3, "lines.markersize": 5}
# Of fewer draft tokens a share says little.
_ENOUGH = 10
_WIDTH = 5.2


def require_packages() -> None:
    """Refuse before work starts what could not be drawn."""
    if find_spec("matplotlib") is None:
        raise BenchError("the plots of a benchmark need matplotlib; pip install 'selfspec[bench]', or give --no-plots")


def draw(cells: Sequence[MeasuredCell], folder: Path) -> list[str]:
    """Draw what there are results for, of at least one cell; return the names of the files."""
    from matplotlib import rc_context

    with rc_context(_STYLE):
        drawn = {SPEED: _speed(cells), ACCEPTANCE: _acceptance(cells)}
        for name, figure in drawn.items():
            if figure is None:
                (folder / name).unlink(missing_ok=True)
                continue
            with whole(folder / name, KEPT) as draft:
                figure.savefig(draft, dpi=130)
    return [name for name, figure in drawn.items() if figure is not None]


def _speed(cells: Sequence[MeasuredCell]) -> Figure:
    names = list(dict.fromkeys(record.arm.name for measured in cells for record in measured.arms))
    figure, panels = _panels(cells, 0.9 + 0.3 * len(names))
    for panel, measured in zip(panels, cells, strict=True):
        panel.axvline(1, color="#888888", linewidth=0.8)
        for arm, found in measured.figures.items():
            ratio = found.decoding_against.get("model_generate")
            if ratio is not None:
                beside = [[ratio.value - ratio.low], [ratio.high - ratio.value]]
                panel.errorbar(
                    ratio.value, names.index(arm.name), xerr=beside, capsize=3, **_style(0 if arm.own else 1)
                )
        panel.set(xlabel="decoding speed against model.generate", ylim=(len(names) - 0.5, -0.5))
        panel.set_yticks(range(len(names)), names)
        panel.set_xlim(left=0)
        panel.grid(axis="x")
    return figure


def _acceptance(cells: Sequence[MeasuredCell]) -> Figure | None:
    drafts = [
        [each for each in measured.arms if each.scored and each.counts and each.counts.judged_per_depth]
        for measured in cells
    ]
    names = list(dict.fromkeys(record.arm.name for records in drafts for record in records))
    if not names:
        return None
    drafting = [(measured, records) for measured, records in zip(cells, drafts, strict=True) if records]
    figure, panels = _panels([measured for measured, _ in drafting], 3.2)
    for panel, (_, records) in zip(panels, drafting, strict=True):
        for record in records:
            assert record.counts is not None
            pairs = zip(record.counts.accepted_per_depth, record.counts.judged_per_depth, strict=True)
            shares = [accepted / judged for accepted, judged in takewhile(lambda pair: pair[1] >= _ENOUGH, pairs)]
            style = _style(names.index(record.arm.name))
            panel.plot(range(1, len(shares) + 1), shares, linewidth=1.2, label=record.arm.name, **style)
        panel.locator_params(axis="x", integer=True)
        depth = f"depth in the draft, where at least {_ENOUGH} were judged"
        panel.set(ylim=(0, 1.02), xlabel=depth, ylabel="share accepted of those judged")
        panel.grid()
    named = {str(line.get_label()): line for panel in panels for line in panel.get_lines()}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=min(len(names), 4))
    return figure


def _panels(cells: Sequence[MeasuredCell], height: float) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each cell, up to three beside one another."""
    # Not pyplot: it keeps global state, and asks for a display.
    from matplotlib.figure import Figure

    across = min(len(cells), 3)
    down = -(-len(cells) // across)
    figure = Figure(figsize=(1.8 + 4 * across, height * down), layout="constrained")
    panels: list[Axes] = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
    for panel in panels[len(cells) :]:
        panel.set_visible(False)
    for panel, measured in zip(panels, cells, strict=False):
        cell = measured.cell
        place = f"batch {cell.batch}, prompt of {cell.context} tokens"
        panel.set_title(f"{cell.workload}, temperature {cell.temperature:g}\n{place}")
    return figure, panels[: len(cells)]


def _style(number: int) -> dict[str, Any]:
    return {"marker": _MARKERS[number % len(_MARKERS)], "color": _COLOURS[number % len(_COLOURS)]}
