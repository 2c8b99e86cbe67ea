"""Draw the lab's tables: one function for every picture, legible in a column of a paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from numbers import Real
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from selfspec.errors import StudyError
from selfspec.files.writing import whole
from selfspec.tools.lab.table import ARM, CONDITIONS, positions, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

# The qualitative palette of Okabe and Ito (2008), and two of Tol (2021) that go with it.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, OLIVE, WINE = "#E69F00", "#56B4E9", "#000000", "#999933", "#882255"
PALE = "#BBBBBB"
SEQUENCE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, OLIVE, WINE)
"""Colours that the colour-blind tell apart, in this order."""

STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # names may hold dollar signs
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "lines.markersize": 3,
    "lines.linewidth": 0.9,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "selfspec",
}
"""Settings of matplotlib that every picture shares."""

COLUMN = 3.3
"""Width of a column of a paper, in inches."""

_MARKERS, _DASHES = "osv^dDPX*", ("-", "--", ":", "-.")
# Markers on a line at most.
_MARKED = 12
_PANEL, _LINE, _TURNED = 1.7, 0.13, 1.5
# Keys of the legend beside each other, at most, and the letters that a key takes beside its name.
_KEYS_ACROSS, _KEY = 3, 7
# Width of a letter in sizes of the font, letters of the narrowest title, and height of another line of it in inches.
_LETTER, _NARROWEST, _FURTHER = 0.6, 16, 0.13
# Numbers of columns and of lines of a heat map that have room for their figures; its share of the width.
_LABELLED, _HEATED = (9, 40), 0.75
# What a speed-up or a mean accepted length is compared with.
_BASELINES = {"speedup": 1.0, "mean_accepted_length": 1.0}


def plot(
    table: DataFrame,
    x: str,
    y: str,
    by: str | None = None,
    *,
    colour: str | None = None,
    panel: str | None = None,
    to: str | Path | None = None,
    width: float = COLUMN,
    height: float | None = None,
    font: float = 7,
) -> Figure:
    """Draw one column of a table over another, with the intervals that it holds.

    A figure over numbers is a line, over figures that have intervals themselves points, and over names a point on a
    line of its own; with `colour` it is a heat map. `x="position"` draws the share accepted at each position of drafts.

    Args:
        table: of `selfspec.bench` or `selfspec.ablate`, or any other with such columns.
        x: a column.
        y: a column; of a heat map its lines.
        by: a column whose values are told apart by colour and marker, named in the legend.
        colour: a column that the colours of a heat map show.
        panel: a column each of whose values has a panel.
        to: a file; its name's end says the format, as `.pdf`, `.svg` or `.png`.
        width: inches.
        height: inches; None: as the content needs.
        font: points.

    Returns:
        The picture, for matplotlib.

    Raises:
        StudyError: the table has no such column, or nothing to draw.
        StorageError: the file cannot be written.
    """
    # Not pyplot: it keeps global state, and asks for a display.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn = positions(table) if x == "position" and "position" not in table else table
    wanted = [name for name in (x, y, by, colour, panel) if name is not None]
    for column in wanted:
        if column not in drawn:
            raise StudyError(f"the table has no column {column!r}; it has {', '.join(sorted(map(str, drawn.columns)))}")
    drawn = drawn.dropna(subset=wanted)
    if drawn.empty:
        raise StudyError(f"the table has no line with {' and '.join(wanted)}")
    names: list[Any] = [*drawn[panel].unique()] if panel else [None]
    keys = [] if by is None else _ordered(drawn[by].unique())
    called = {key: _cut(key, _letters(width, font) - _KEY) for key in keys}
    if len({*called.values()}) < len(keys):
        called = {key: str(key) for key in keys}
    looks = {key: {**_look(number), "label": called[key]} for number, key in enumerate(keys)}
    rows = drawn[y].nunique() if colour or _is_named(drawn, x, y) else 0
    # A title begins where the axes do, right of what names their lines.
    beside = 2 + max((len(_cut(each)) for each in drawn[y].unique() if isinstance(each, str)), default=6)
    room = max(_NARROWEST, _letters(width, font) - beside)
    titles = {name: wrap(str(name), room) for name in names if name is not None}
    each = 0.35 + _LINE * rows if rows else _PANEL
    each += _TURNED if colour and _is_named(drawn, x) else 0
    longest = max(map(len, called.values()), default=0)
    across = max(1, min(_KEYS_ACROSS, len(keys), _letters(width, font) // (longest + _KEY)))
    legend = 0.14 * -(-len(keys) // across)
    further = _FURTHER * sum(len(lines) - 1 for lines in titles.values())
    with rc_context({**STYLE, "font.size": font, "axes.titlesize": font, "legend.fontsize": font - 0.5}):
        size = width, height or 0.45 + legend + further + len(names) * (each + 0.25)
        figure = Figure(size, layout="constrained")
        grid = figure.subplots(len(names), 1, squeeze=False, sharex=True, sharey=not rows)
        for axes, name in zip(grid[:, 0], names, strict=True):
            shown = drawn if panel is None else drawn[drawn[panel] == name]
            if name in titles:
                axes.set_title("\n".join(titles[name]), loc="left")
            if colour is not None:
                _heat(figure, axes, shown, x, y, colour, int(_HEATED * room))
            else:
                _points(axes, shown, x, y, by, looks)
            axes.label_outer()
            for beside_axes in figure.axes:
                beside_axes.set_ylabel("\n".join(wrap(beside_axes.get_ylabel(), _letters(each, font))))
        # Panels share their axes: an end that is set before the last one is drawn cuts off what lies beyond it.
        if colour is None:
            for axes in grid[:, 0]:
                _baseline(axes, x, y)
        if keys:
            handles, labels = grid[0, 0].get_legend_handles_labels()
            shown_keys = dict(zip(labels, handles, strict=True))
            for axes in grid[1:, 0]:
                shown_keys |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
            figure.legend(
                shown_keys.values(),
                shown_keys,
                loc="outside upper center",
                ncols=across,
                title=_words(by or ""),
            )
        if to is not None:
            with whole(Path(to)) as draft:
                figure.savefig(draft, dpi=300, metadata={"Date": None} if Path(to).suffix == ".svg" else None)
    return figure


def _look(number: int) -> dict[str, Any]:
    turn, place = divmod(number, len(SEQUENCE))
    marker = _MARKERS[(place + turn) % len(_MARKERS)]
    return {"color": SEQUENCE[place], "marker": marker, "linestyle": _DASHES[turn % len(_DASHES)]}


def _cut(name: Any, most: int = 28) -> str:
    """Return a name as far as a picture has room for it: its beginning and its end."""
    text = str(name)
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-most // 2 :]}"


def _letters(inches: float, font: float) -> int:
    """Return the number of letters that there is room for."""
    return int(72 * inches / (_LETTER * font))


def _ordered(values: Iterable[Any]) -> list[Any]:
    """Return numbers in order, and names as they are."""
    given = [*values]
    return sorted(given) if all(isinstance(each, Real) for each in given) else given


def _is_named(table: DataFrame, *columns: str) -> bool:
    """Return whether one of some columns holds names."""
    return any(table[name].map(lambda value: isinstance(value, str)).any() for name in columns)


def _words(name: str) -> str:
    words = {"alpha": "acceptance of the first draft token", "c": "draft cost ratio c", "part": "left out"}
    words |= {"best_so_far": "best predicted speedup so far"}
    return words.get(name, name.replace("_", " "))


def _ends(table: DataFrame, name: str) -> Any:
    """Return the distances of an interval's ends from its figure, `[2, points]`; None where there are none."""
    if f"{name}_low" not in table:
        return None
    return [
        (table[name] - table[f"{name}_low"]).fillna(0).clip(0),
        (table[f"{name}_high"] - table[name]).fillna(0).clip(0),
    ]


def _points(
    axes: Axes, table: DataFrame, x: str, y: str, by: str | None, looks: Mapping[Any, Mapping[str, Any]]
) -> None:
    from matplotlib.ticker import MaxNLocator

    named, both = _is_named(table, y), f"{x}_low" in table
    lines = list(dict.fromkeys(table[y])) if named else []
    for key in looks or [None]:
        own = table if key is None else table[table[by] == key]
        if own.empty:
            continue
        look = dict(looks[key] if looks else _look(0))
        # No line joins what is of several drafts or conditions.
        if named or both or own[x].duplicated().any():
            look["linestyle"] = ""
        else:
            own = own.sort_values(x)
            look["markevery"] = -(-len(own) // _MARKED)
        at = [lines.index(name) for name in own[y]] if named else own[y]
        axes.errorbar(
            own[x],
            at,
            None if named else _ends(own, y),
            _ends(own, x) if named or both else None,
            elinewidth=0.6,
            capsize=1.5 if named else 0,
            **look,
        )
    if named:
        axes.set_yticks(range(len(lines)), [*map(_cut, lines)])
        axes.set_ylim(len(lines) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
    else:
        axes.set_ylabel(_words(y))
        if (table[x] % 1 == 0).all():
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlabel(_words(x))
    axes.grid(axis="x" if named else "both")


def _baseline(axes: Axes, x: str, y: str) -> None:
    """Draw plain decoding, and begin shares and speeds at 0."""
    for name, line, ends in ((x, axes.axvline, axes.set_xlim), (y, axes.axhline, axes.set_ylim)):
        for figure, value in _BASELINES.items():
            if figure in name:
                line(value, color=PALE, lw=0.9, zorder=0)
                ends(0)


def _heat(figure: Figure, axes: Axes, table: DataFrame, x: str, y: str, colour: str, room: int) -> None:
    """Draw a heat map; `room` is the number of letters beside each other that fit below it."""
    cells = table.groupby([y, x], sort=False)
    if (cells[colour].nunique() > 1).any():
        differing = [name for name in (*CONDITIONS, *ARM) if name in table and (cells[name].nunique() > 1).any()]
        raise StudyError(
            f"several lines have one {x} and one {y}, and another {colour}: they differ in {', '.join(differing)}; "
            "choose by --only, or a panel for each"
        )
    values = table.pivot_table(index=y, columns=x, values=colour, sort=False)
    values = values.reindex(index=_ordered(values.index), columns=_ordered(values.columns))
    image = axes.imshow(values, cmap="cividis", aspect="auto")
    (lines, columns), middle = values.shape, (image.norm.vmin + image.norm.vmax) / 2  # type: ignore[operator]
    if columns <= _LABELLED[0] and lines <= _LABELLED[1]:
        for row, column in product(range(lines), range(columns)):
            value = values.iat[row, column]
            if value == value:
                ink = "white" if value < middle else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=5, color=ink)
    up, across = ([_cut(each) if isinstance(each, str) else f"{each:g}" for each in side] for side in values.axes)
    named = _is_named(table, x)
    # Numbers are left out where they would touch; names are turned, and none is.
    every = 1 if named else -(-columns * (max(map(len, across)) + 1) // room)
    axes.set_xticks(range(0, columns, every), across[::every], rotation=90 if named else 0)
    axes.set_yticks(range(lines), up)
    axes.tick_params(length=0)
    axes.set(xlabel=_words(x), ylabel=_words(y))
    figure.colorbar(image, ax=axes, label=_words(colour), aspect=25, fraction=0.06)


def read_table(file: Path) -> DataFrame:
    """Read a table of the lab: that of a folder with a report, its `runs.jsonl`, or a file of CSV or Parquet."""
    import pandas

    from selfspec.tools.lab.runs import FILE, Runs

    readers = {".parquet": pandas.read_parquet, ".csv": pandas.read_csv}
    try:
        # Costs are in the table of the report alone.
        if (reported := file / "table.parquet").is_file():
            return pandas.read_parquet(reported)
        if file.is_dir() or file.name == FILE:
            runs = Runs(file if file.is_dir() else file.parent)
            return summarise([*runs.measured("generation"), *runs.measured("teacher forcing")])
        if file.suffix not in readers:
            raise StudyError(f"{file} is no table; give a folder of a study, its {FILE}, or a .csv or .parquet file")
        return readers[file.suffix](file)
    except (OSError, ValueError) as error:
        raise StudyError(f"{file} cannot be read as a table ({error})") from error
