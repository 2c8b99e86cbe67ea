"""`selfspec plot`: a picture of a table of the lab, for a paper."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.options import Output
from selfspec.errors import StudyError


@dataclass(frozen=True, kw_only=True)
class Plotted:
    """`selfspec plot`: the file, and the number of lines of the table that it is drawn from."""

    file: str
    lines: int


def plot(
    tables: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Folders of studies or benchmarks, runs.jsonl, .csv or .parquet."),
    ],
    x: Annotated[
        str, typer.Option("--x", metavar="COLUMN", help="Column across; `position`: that of a draft's tokens.")
    ],
    y: Annotated[str, typer.Option("--y", metavar="COLUMN", help="Column up, drawn with its interval.")],
    to: Annotated[Path, typer.Option(metavar="FILE", help="Picture: .pdf, .svg or .png.")],
    by: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column that colours and markers tell apart. Default: none.")
    ] = None,
    colour: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Draw a heat map of this column. Default: none.")
    ] = None,
    panel: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column with a panel for each value.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN=VALUE", help="Lines to draw; may be repeated. Default: all.")
    ] = None,
    width: Annotated[float, typer.Option(min=1, max=20, help="Inches; a column of a paper is 3.3.")] = 3.3,
    height: Annotated[float | None, typer.Option(min=0.5, max=30, help="Inches. Default: as is needed.")] = None,
    font: Annotated[float, typer.Option(min=3, max=30, help="Size of letters, in points.")] = 7.0,
    output: Output = "text",
) -> Plotted:
    """Draw columns of a table that `bench`, `ablate` or `search` made; docs/columns.md says what each is."""
    from selfspec.files.writing import check_output_file
    from selfspec.tools.lab.plot import plot as draw
    from selfspec.tools.lab.plot import read_table
    from selfspec.tools.lab.report import require_packages

    require_packages()
    import pandas

    check_output_file(to)
    if to.suffix not in (".pdf", ".svg", ".png"):
        raise StudyError(f"{to}: pictures are .pdf, .svg or .png; end its name with one of these")
    found = pandas.concat(map(read_table, tables), ignore_index=True)
    for each in only or ():
        name, given, value = each.partition("=")
        if not given or name not in found:
            raise StudyError(f"--only {each}: write COLUMN=VALUE; columns are {', '.join(sorted(found.columns))}")
        shown = (f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in found[name])
        found = found[[each == value for each in shown]]
    draw(found, x, y, by, colour=colour, panel=panel, to=to, width=width, height=height, font=font)
    if output == "text":
        print(f"{to} has {len(found)} lines of {', '.join(map(str, tables))}")
    return Plotted(file=str(to), lines=len(found))
