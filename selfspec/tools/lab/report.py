"""Report what the lab measures: the same parts as Markdown and as HTML, tables as files, and pictures."""

from __future__ import annotations

import base64
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.registry import AUTO, kinds, parts_of
from selfspec.errors import BenchError
from selfspec.files.writing import whole
from selfspec.measure.estimate import Estimate

KEPT = "what was measured is kept: make room and repeat the command"
"""Advice in messages about a report that cannot be written."""

MARKDOWN, PAGE = "report.md", "report.html"

_SPECIAL = re.compile(r"[\\`*\[\]<>|~&#$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# What makes a list of a line that begins with it.
_BEGINNING = re.compile(r"^(\d*)([-+.)])(?= )")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0 } th, td { padding: .2em .7em; text-align: right }
th:first-child, td:first-child { text-align: left } tr:nth-child(even) { background: #f4f4f4 } img { max-width: 100% }
pre.text { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; border: 1px solid #ddd; padding: .7em }
span.key { padding: .1em .5em; margin-right: .5em } h2 { margin-top: 2em }
"""


def require_packages() -> None:
    """Refuse before work starts what could not be reported."""
    missing = [name for name in ("matplotlib", "pandas", "pyarrow") if find_spec(name) is None]
    if missing:
        raise BenchError(f"reports need {' and '.join(missing)}; pip install 'selfspec[bench]'")


class Report:
    """A page, part by part. Texts are shown as they are, whatever they hold."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._markdown = [f"# {escaped(title)}"]
        self._html = [f"<h1>{escape(title)}</h1>"]

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._add(f"## {escaped(text)}", f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """Add a sentence or several; none, if there are none."""
        if text:
            self._add(escaped(text), f"<p>{escape(text)}</p>")

    def points(self, lines: Sequence[str]) -> None:
        """Add a list; none of no lines."""
        if lines:
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            self._add("\n".join(f"- {escaped(line)}" for line in lines), f"<ul>{items}</ul>")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table; none without rows."""
        if rows:
            cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
            names = "".join(f"<th>{escape(name)}</th>" for name in head)
            self._add(markdown_table(head, rows), f"<table><tr>{names}</tr>{cells}</table>")

    def picture(self, file: Path) -> None:
        """Add a picture that lies beside the page; the page of HTML holds it."""
        data = base64.b64encode(file.with_suffix(".svg").read_bytes()).decode()
        name = escape(file.stem.replace("_", " "))
        self._add(f"![{file.stem}]({file.name})", f'<img alt="{name}" src="data:image/svg+xml;base64,{data}">')

    def coloured(self, html: str) -> None:
        """Add a part that only HTML can show."""
        self._html.append(html)

    @property
    def markdown(self) -> str:
        """The page as Markdown."""
        return "\n\n".join(self._markdown) + "\n"

    @property
    def html(self) -> str:
        """The page as HTML, which needs nothing else."""
        head = f"<meta charset=utf-8><title>{escape(self._title)}</title><style>{_STYLE}</style>"
        return f"<!doctype html><html lang=en>{head}<body>{''.join(self._html)}</body></html>\n"

    def write(self, folder: Path) -> list[Path]:
        """Write both pages into a folder."""
        for name, text in ((MARKDOWN, self.markdown), (PAGE, self.html)):
            with whole(folder / name, KEPT) as draft:
                draft.write_text(text, encoding="utf-8")
        return [folder / MARKDOWN, folder / PAGE]

    def _add(self, markdown: str, html: str) -> None:
        self._markdown.append(markdown)
        self._html.append(html)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts as Markdown, whatever they hold."""
    lines = [list(map(escaped, head)), ["---"] * len(head), *(map(escaped, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escaped(text: str) -> str:
    """Return a text as Markdown that shows it in one line: no markup, no HTML, no end of a table's cell."""
    line = "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(text.split()))
    return _BEGINNING.sub(r"\1\\\2", _SPECIAL.sub(r"\\\g<0>", line))


def write_data(table: Sequence[Mapping[str, Any]], about: Mapping[str, Any], folder: Path, name: str) -> list[Path]:
    """Write rows as CSV and as Parquet, which also holds `about`: what they were made with."""
    import pandas
    import pyarrow
    from pyarrow import parquet

    frame = pandas.DataFrame(list(table))
    lists_as_json = frame.map(lambda value: json.dumps(value) if isinstance(value, list) else value)
    with whole(folder / f"{name}.csv", KEPT) as draft:
        draft.write_text(lists_as_json.to_csv(index=False, float_format="%.6g", lineterminator="\n"), encoding="utf-8")
    data = pyarrow.Table.from_pandas(frame, preserve_index=False)
    with whole(folder / f"{name}.parquet", KEPT) as draft:
        parquet.write_table(data.replace_schema_metadata({"selfspec": json.dumps(about)}), draft)
    return [folder / f"{name}.csv", folder / f"{name}.parquet"]


# The qualitative palette of Okabe and Ito (2008), and two of Tol (2021) that go with it.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, OLIVE, WINE = "#E69F00", "#56B4E9", "#000000", "#999933", "#882255"
GREY, PALE = "#777777", "#BBBBBB"
SEQUENCE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, OLIVE, WINE)
"""Colours of lines that are no kind of draft, in this order."""

STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # names may hold dollar signs
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.markersize": 4.5,
}
"""Settings of matplotlib that every picture shares."""

Dashes = str | tuple[int, tuple[int, ...]]
_DASHES: tuple[Dashes, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
_MARKERS = ("o", "s", "^", "d", "v", "p", "*", "X", "h")


@dataclass(frozen=True)
class Mark:
    """Colour, as `#RRGGBB`, and marker of a draft or line, the same in every picture; of cascades it is not filled."""

    colour: str
    marker: str
    dashes: Dashes = "-"
    filled: bool = True

    @property
    def of_line(self) -> dict[str, Any]:
        """Arguments of `Axes.plot` and `Axes.errorbar`."""
        face = self.colour if self.filled else "white"
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes, "markerfacecolor": face}


def mark_of(draft: str | None) -> Mark:
    """Return the mark of a draft by its name, such as `lookup+exit:4`; None: plain decoding."""
    if draft is None:
        return Mark(BLACK, "o")
    colours = [colour for colour in SEQUENCE if colour != BLACK]
    known = {**kinds(), AUTO: None}
    order = list(dict.fromkeys(known.values()))
    parts = [part for part in parts_of(draft) if not part.startswith("vocab")]
    # The last part of a cascade says its colour.
    for part in reversed(parts):
        name = part.removeprefix("union:").partition(":")[0]
        if name in known:
            turn, place = divmod(order.index(known[name]), len(colours))
            return Mark(colours[place], _MARKERS[turn], filled=len(parts) == 1)
    return Mark(GREY, "h")


def marks_of(drafts: Iterable[str]) -> dict[str, Mark]:
    """Return the marks of several drafts in one picture: those of one kind differ by dashes and markers."""
    return distinct_marks({draft: mark_of(draft) for draft in drafts})


def distinct_marks(marks: Mapping[str, Mark]) -> dict[str, Mark]:
    """Return the marks of one picture: those of one colour differ by dashes and markers."""
    found: dict[str, Mark] = {}
    for name, own in marks.items():
        others = [each.marker for each in found.values() if each.colour == own.colour]
        alike = len(others)
        marker = _MARKERS[(alike - 1) % len(_MARKERS)] if own.marker in others else own.marker
        found[name] = Mark(own.colour, marker, _DASHES[alike % len(_DASHES)], own.filled)
    return found


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches: of a page within its margins.
_WIDTH, _HEIGHT = 7.2, 9.2
_DPI = 150
# Letters of a note in an inch; columns of a heat map that have room for a number each.
_NOTE_LETTERS, _LABELLED = 20, 17
_RC: dict[Any, Any] = {**STYLE, "svg.fonttype": "none", "svg.hashsalt": "selfspec"}


@dataclass(frozen=True)
class Panel:
    """One panel of a picture."""

    title: str
    draw: Callable[[Axes], None]


@dataclass(frozen=True)
class Picture:
    """A picture; `name` is that of its files.

    Attributes:
        height: of a panel, in inches.
        across: panels side by side, at most.
        note: text below all panels.
        legend: marks by their meanings.
        share: whether all panels have the same axes.
        finish: draws what all panels share.
    """

    name: str
    panels: Sequence[Panel]
    height: float
    across: int = 2
    note: str = ""
    legend: Mapping[str, Mark] = field(default_factory=dict)
    share: bool = True
    finish: Callable[[Figure, Sequence[Axes]], None] | None = None

    def save(self, folder: Path) -> Path:
        """Write the picture as SVG and PNG; return the PNG file."""
        from matplotlib import rc_context

        with rc_context(_RC):
            figure = self.figure()
            for suffix in (".svg", ".png"):
                with whole(folder / f"{self.name}{suffix}", KEPT) as draft:
                    figure.savefig(draft, dpi=_DPI, metadata={"Date": None} if suffix == ".svg" else None)
        return folder / f"{self.name}.png"

    def figure(self) -> Figure:
        """Draw it, within matplotlib's present style."""
        # Not pyplot: it keeps global state, and asks for a display.
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D

        across = min(self.across, len(self.panels))
        down = -(-len(self.panels) // across)
        # Room for notes and legend, also where there are few panels.
        height = min(0.8 + self.height * down + 0.15 * (-(-len(self.legend) // 3)), _HEIGHT)
        figure = Figure((_WIDTH, height), layout="constrained")
        grid: list[Axes] = list(figure.subplots(down, across, squeeze=False, sharex=self.share, sharey=self.share).flat)
        for panel, axes in zip(self.panels, grid, strict=False):
            axes.set_title(panel.title)
            panel.draw(axes)
        shown, empty = grid[: len(self.panels)], grid[len(self.panels) :]
        for axes in empty:
            axes.set_axis_off()
        if self.share:
            for axes in shown:
                axes.label_outer()
        if self.finish:
            self.finish(figure, shown)
        figure.supxlabel(textwrap.fill(self.note, int(_NOTE_LETTERS * _WIDTH)), fontsize=6.5)
        if self.legend:
            keys = [Line2D([], [], label=name, lw=1, **mark.of_line) for name, mark in self.legend.items()]
            figure.legend(handles=keys, loc="outside upper center", ncols=min(3, len(keys)))
        return figure


def dots(axes: Axes, lines: Mapping[str, Estimate | None], marks: Mapping[str, Mark], baseline: float) -> None:
    """Draw a figure of each name as a dot on a line of its own, with its interval."""
    for line, (name, found) in enumerate(lines.items()):
        if found is not None:
            ends = [[found.value - found.low], [found.high - found.value]]
            how = {**marks[name].of_line, "linestyle": ""}
            axes.errorbar(found.value, line, xerr=ends, capsize=2, elinewidth=0.8, capthick=0.8, **how)
    axes.axvline(baseline, color=PALE, linewidth=0.9, zorder=0)
    axes.set_yticks(range(len(lines)), list(lines))
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def curves(axes: Axes, shares: Mapping[str, Sequence[Estimate]], marks: Mapping[str, Mark]) -> None:
    """Draw shares of each name by depth, from 1 on, side by side so that intervals can be told apart."""
    longest = max(map(len, shares.values()), default=0)
    for number, (name, known) in enumerate(shares.items()):
        if known:
            at = np.arange(1, len(known) + 1) + 0.4 * ((number + 0.5) / len(shares) - 0.5)
            interval(axes, at.tolist(), known, marks[name], 1.0)
    if not longest:
        axes.text(0.5, 0.5, "too few tokens", ha="center", va="center", transform=axes.transAxes, color=GREY)
    axes.set(ylim=(0, 1.05), xlim=(0.5, max(longest, axes.get_xlim()[1] - 0.5) + 0.5))
    axes.set_xticks(range(1, int(axes.get_xlim()[1]) + 1))
    axes.grid(axis="y")


def interval(axes: Axes, at: Sequence[float], known: Sequence[Estimate], mark: Mark, width: float) -> None:
    """Draw estimates with their intervals, joined by lines of a width, of none if that is 0."""
    ends = [[each.value - each.low for each in known], [each.high - each.value for each in known]]
    how = mark.of_line if width else {**mark.of_line, "linestyle": ""}
    axes.errorbar(at, [each.value for each in known], ends, lw=width, elinewidth=0.6, **how)


def by_layer(
    axes: Axes, lines: Mapping[str, Mapping[int, Estimate]], marks: Mapping[str, Mark], label: str, most: float
) -> None:
    """Draw figures of each layer as lines, their intervals shaded, from 0 to a little above `most`."""
    for name, layers in lines.items():
        at, known = sorted(layers), [layers[layer] for layer in sorted(layers)]
        mark = marks[name]
        size = 2.5 if len(at) <= 40 else 1.5
        axes.plot(at, [each.value for each in known], lw=0.9, ms=size, zorder=3, **mark.of_line)
        axes.fill_between(
            at, [each.low for each in known], [each.high for each in known], color=mark.colour, alpha=0.12, lw=0
        )
    every = sorted({layer for layers in lines.values() for layer in layers})
    axes.set_xticks(every if len(every) <= _LABELLED else [layer for layer in every if layer % 5 == 0])
    axes.set(ylim=(0, 1.08 * most), ylabel=label, xlim=(every[0] - 0.5, every[-1] + 0.5))
    axes.grid(axis="both")


def heat(axes: Axes, values: NDArray[np.float64], rows: Sequence[str], columns: Sequence[str], digits: str) -> None:
    """Draw a table as colours, with its numbers where they have room; `one_scale` gives the colours their meaning."""
    axes.imshow(values, cmap="cividis", aspect="auto")
    if len(columns) <= _LABELLED:
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                axes.text(column, row, format(value, digits), ha="center", va="center", fontsize=5.5)
    every = 1 if len(columns) <= _LABELLED else 5
    axes.set_xticks(range(0, len(columns), every), columns[::every])
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)


def one_scale(figure: Figure, grid: Sequence[Axes], label: str, low: float, high: float) -> None:
    """Give all heat maps of a figure the same colours for the same figures, and one key to them."""
    for axes in grid:
        image = axes.get_images()[0]
        image.set_clim(low, high)
        values: Any = image.get_array()
        for text in axes.texts:
            column, row = text.get_position()
            text.set_color("white" if values[int(row), int(column)] < low + 0.55 * (high - low) else "black")
    figure.colorbar(image, ax=list(grid), label=label, aspect=30, fraction=0.04)
