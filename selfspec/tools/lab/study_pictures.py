"""The pictures of a study: which layers matter, how deep drafts go, which exits pay, and acceptance against cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec.measure.estimate import Estimate
from selfspec.measure.palette import PALE, SEQUENCE, VERMILION, Mark, mark_of, marks_of
from selfspec.tools.lab.drawing import Panel, Picture, by_layer, curves, interval
from selfspec.tools.lab.findings import TextFindings
from selfspec.tools.lab.table import Row, estimate_in, pareto_front

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Drafts that have a line each, and labelled drafts of a front; colours and markers of lines that are no drafts.
_DRAFTS, _LABELS = 5, 5
_LINES = tuple(zip(SEQUENCE, "osv^dDPX*", strict=True))
_MEANING = "acceptance: top-1 agreement where greedy, 1 - TV where sampled"


def draw(found: Sequence[TextFindings], folder: Path) -> list[Path]:
    """Draw every picture that a study has data for; return the files."""
    pictures = [_importance(found), _positions(found), _exits(found), _pareto(found), _agreement(found)]
    return [picture.save(folder) for picture in pictures if picture.panels]


def _importance(found: Sequence[TextFindings]) -> Picture:
    shown = [each for each in found if each.importance]
    names = dict.fromkeys(name for each in shown for name in each.importance)
    legend = {name: Mark(colour, marker) for name, (colour, marker) in zip(names, _LINES, strict=False)}
    panels = [
        Panel(each.title, partial(by_layer, lines=each.importance, marks=legend, label="acceptance", most=1.0))
        for each in shown
    ]
    note = f"What is left out of one layer. Shaded: 95 %; {_MEANING}"
    return Picture("importance", panels, 1.9, across=1, note=note, legend=legend, finish=_layers("layer left out"))


def _layers(label: str) -> Callable[[Figure, Sequence[Axes]], None]:
    def finish(_: Figure, grid: Sequence[Axes]) -> None:
        grid[-1].set_xlabel(label)

    return finish


def _positions(found: Sequence[TextFindings]) -> Picture:
    panels: list[Panel] = []
    legend: dict[str, Mark] = {}
    for each in (one for one in found if one.best):
        rows = {row["draft"]: row for row in each.promising(_DRAFTS)}
        # The longest draft length shows the most positions.
        longest = {row["draft"]: row for row in each.rows if row["draft"] in rows}
        marks = marks_of(longest)
        shares = {_short(draft): _by_position(row, "") for draft, row in longest.items()}
        named = {_short(draft): mark for draft, mark in marks.items()}
        legend |= named
        confirmed = {_short(row["draft"]): row for row in each.confirmed if row["draft"] in rows}
        panels.append(
            Panel(each.title, partial(_estimated_and_measured, shares=shares, marks=named, measured=confirmed))
        )
    note = "share accepted of those judged, by position in the draft. Lines: estimated; open points: measured; 95 %"
    return Picture("acceptance_by_position", panels, 2.5, note=note, legend=legend)


def _estimated_and_measured(
    axes: Axes, shares: dict[str, list[Estimate]], marks: dict[str, Mark], measured: dict[str, Row]
) -> None:
    curves(axes, shares, marks)
    for name, row in measured.items():
        known = _by_position(row, "measured_")
        if known:
            mark = marks[name]
            open_mark = Mark(mark.colour, mark.marker, mark.dashes, filled=False)
            interval(axes, [number + 1.25 for number in range(len(known))], known, open_mark, 0)


def _by_position(row: Row, how: str) -> list[Estimate]:
    counts = zip(row[f"{how}accepted_by_position"], row[f"{how}judged_by_position"], strict=True)
    shares = [Estimate.of_share(*pair) for pair in counts]
    return [share for share in shares if share is not None]


def _exits(found: Sequence[TextFindings]) -> Picture:
    shown = [each for each in found if each.exits]
    lengths = sorted({length for each in shown for length in each.exits})
    legend = {_in_words(length): Mark(*mark) for length, mark in zip(lengths, _LINES, strict=False)}
    panels = []
    for each in shown:
        lines = {_in_words(length): layers for length, layers in each.exits.items()}
        panels.append(Panel(each.title, partial(_speeds_by_exit, lines=lines, marks=legend)))
    note = "Grey: plain decoding; shaded: intervals. Circle: the best prediction, where one is above 1"
    return Picture("exits", panels, 2.2, across=1, note=note, legend=legend, finish=_layers("exit layer"))


def _in_words(length: int) -> str:
    return f"{length} draft token{'s' * (length != 1)}"


def _speeds_by_exit(axes: Axes, lines: dict[str, dict[int, Estimate]], marks: dict[str, Mark]) -> None:
    points = [(found, layer) for layers in lines.values() for layer, found in layers.items()]
    best, layer = max(points, key=lambda point: point[0].value)
    by_layer(axes, lines, marks, "predicted speed-up", max(1.0, best.value))
    axes.axhline(1.0, color=PALE, lw=0.9, zorder=0)
    # Where every exit loses there is none to choose.
    if best.value > 1:
        axes.scatter(layer, best.value, 60, facecolors="none", edgecolors=VERMILION, lw=1.2, zorder=4)


def _pareto(found: Sequence[TextFindings]) -> Picture:
    shown = [each for each in found if each.stepping]
    legend = {
        row["kind"]: Mark(mark_of(row["kind"]).colour, mark_of(row["kind"]).marker, "")
        for each in shown
        for row in each.stepping
    }
    note = (
        f"{_MEANING}. Line: no draft is cheaper and better. Circle: the highest predicted speed-up, where above 1. "
        "Without look-ups, whose drafts cost nothing and come in some rounds only"
    )
    return Picture(
        "pareto", [Panel(each.title, partial(_scatter, found=each)) for each in shown], 3.0, note=note, legend=legend
    )


def _scatter(axes: Axes, found: TextFindings) -> None:
    from matplotlib.patheffects import withStroke

    rows = found.stepping
    for kind in dict.fromkeys(row["kind"] for row in rows):
        some = [row for row in rows if row["kind"] == kind]
        mark = mark_of(kind)
        x, y = ([row[name] for row in some] for name in ("c", "alpha"))
        axes.scatter(x, y, 9, mark.colour, marker=mark.marker, zorder=3, alpha=0.7, lw=0)
    front = pareto_front(rows)
    axes.step(*([row[name] for row in front] for name in ("c", "alpha")), where="post", color=PALE, lw=0.9)
    top = rows[0]
    if top["predicted_speedup"] > 1:
        axes.scatter(top["c"], top["alpha"], 60, facecolors="none", edgecolors=VERMILION, lw=1.2, zorder=4)
    # The best first; then those of the front with room for a name, above the front, where no draft is.
    labelled: list[Row] = []
    for row in [top, *front]:
        far = all(abs(row["c"] - each["c"]) > 0.45 or abs(row["alpha"] - each["alpha"]) > 0.05 for each in labelled)
        if far and len(labelled) < _LABELS:
            labelled.append(row)
            right = row["c"] > 0.35
            axes.annotate(
                f"{_short(row['draft'])}  {row['predicted_speedup']:.2f}x",
                (row["c"], row["alpha"]),
                xytext=(-5, 4) if right else (4, 4),
                textcoords="offset points",
                ha="right" if right else "left",
                fontsize=5.5,
                path_effects=[withStroke(linewidth=1.5, foreground="white")],
                zorder=5,
            )
    axes.set(xlabel="draft cost ratio c", ylabel="acceptance", xlim=(0, 1.05), ylim=(0, 1.08))


def _agreement(found: Sequence[TextFindings]) -> Picture:
    shown = [each for each in found if each.estimated_and_measured]
    panels = []
    for each in shown:
        rows = each.estimated_and_measured
        title = f"{each.title}: {sum(map(row_agrees, rows))} of {len(rows)} within 95 %"
        panels.append(Panel(title, partial(_beside_each_other, rows=rows)))
    legend = {
        row["kind"]: Mark(mark_of(row["kind"]).colour, mark_of(row["kind"]).marker, "")
        for each in shown
        for row in each.estimated_and_measured
    }
    return Picture("agreement", panels, 3.0, note="both with 95 % intervals", legend=legend)


def _beside_each_other(axes: Axes, rows: Sequence[Row]) -> None:
    axes.axline((0, 0), slope=1, color=PALE, lw=0.8)
    for row in rows:
        x, y = (estimate_in(row, f"{how}acceptance_rate") for how in ("", "measured_"))
        how = {**mark_of(row["kind"]).of_line, "linestyle": ""}
        ends = [[[each.value - each.low], [each.high - each.value]] for each in (x, y)]
        axes.errorbar(x.value, y.value, ends[1], ends[0], ms=3, lw=0.8, **how)
    axes.set(xlabel="estimated acceptance rate", ylabel="acceptance rate, generated", xlim=(0, 1.02), ylim=(0, 1.02))
    axes.set_aspect("equal")


def row_agrees(row: Row) -> bool:
    """Return whether estimate and measurement of a row differ by no more than their intervals explain."""
    return estimate_in(row, "acceptance_rate").agrees_with(estimate_in(row, "measured_acceptance_rate"))


def _short(draft: str) -> str:
    """Name a draft in words: of files only their names, of a skip set what it does without."""
    name = re.sub(r"[^:]*[/\\]", "", draft)
    name = re.sub(r"layers=(\d+)$", r"layer \1", name)
    for part, words in (("skip:", "without "), ("attn=", "attention "), ("mlp=", "MLP "), ("layers=", "layers ")):
        name = name.replace(part, words)
    return name if len(name) <= 32 else name[:31] + "…"
