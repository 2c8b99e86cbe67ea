"""What `selfspec bench` writes and prints of its results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from selfspec.cli.options import OutputFormat
from selfspec.cli.outcome import print_json
from selfspec.errors import BenchError
from selfspec.files.writing import whole
from selfspec.tools.bench import figures, plots
from selfspec.tools.bench.arm import Kind
from selfspec.tools.bench.prediction import prediction, round_cost
from selfspec.tools.bench.record import Record
from selfspec.tools.bench.report import overview, report
from selfspec.tools.bench.results_file import FILE, MeasuredCell, ResultsFile

REPORT = "report.md"


def make_report(folder: Path, with_plots: bool, output: OutputFormat) -> None:
    """Make the report of results in a folder, and print what it comes to.

    Raises:
        BenchError: there are no results, or what the plots need is missing.
    """
    if with_plots:
        plots.require_packages()
    cells = ResultsFile(folder).cells()
    if not cells:
        raise BenchError(f"{folder} holds no results of selfspec bench (no cell in {FILE})")
    write_report(cells, folder, with_plots)
    if output == "json":
        print_json(summary(cells))
    else:
        print_overview(cells, folder)


def write_report(cells: Sequence[MeasuredCell], folder: Path, with_plots: bool) -> None:
    """Write the Markdown, and the plots where they are wanted.

    Raises:
        StorageError: they cannot be written; the results are kept.
    """
    text = report(cells)
    if with_plots:
        text += "\n" + "".join(f"![{Path(name).stem}]({name})\n" for name in plots.draw(cells, folder))
    with whole(folder / REPORT, plots.KEPT) as draft:
        draft.write_text(text, encoding="utf-8")


def print_overview(cells: Sequence[MeasuredCell], folder: Path) -> None:
    """Print the overview as a table, and where the rest is."""
    console = Console(highlight=False, markup=False)
    console.print(Markdown(overview(cells)))
    console.print(f"{folder / REPORT} has the rest.", style="dim")


def summary(cells: Sequence[MeasuredCell]) -> dict[str, Any]:
    """The figures of all cells, ready for JSON."""
    return {"cells": [_cell(measured) for measured in cells]}


def _cell(measured: MeasuredCell) -> dict[str, Any]:
    reference, plain = (_of_kind(measured, kind) for kind in (Kind.GENERATE, Kind.PLAIN))
    return {
        "cell": measured.cell.to_dict(),
        "settings": vars(measured.settings),
        "environment": measured.arms[0].environment,
        "arms": [_arm(record, reference, plain) for record in measured.arms],
    }


def _arm(record: Record, reference: Record | None, plain: Record | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": record.arm.name,
        "arm": record.arm.to_dict(),
        "absence": record.absence,
        "agreement": None if record.agreement is None else record.agreement.to_dict(),
        "memory": None if record.memory is None else vars(record.memory),
    }
    if not record.scored:
        return found
    others = {"model_generate": reference, "plain": plain}
    cost = None if plain is None else round_cost(record, plain)
    predicted = None if plain is None else prediction(record, plain)
    return {
        **found,
        "decoding_tokens_per_second": figures.speed(record, figures.decoding).to_dict(),
        "whole_call_tokens_per_second": figures.speed(record, figures.whole_call).to_dict(),
        "first_token_seconds": figures.first_token_seconds(record).to_dict(),
        "decoding_against": {
            name: figures.ratio(record, other, figures.decoding).to_dict()
            for name, other in others.items()
            if other is not None
        },
        "mean_accepted_length": figures.mean_accepted_length(record),
        "acceptance_rate": None if record.counts is None else record.counts.acceptance_rate,
        "acceptance_by_position": None if record.counts is None else record.counts.acceptance_by_position,
        "cycle_share": figures.cycle_share(record),
        "round_in_plain_steps": None if cost is None else cost.to_dict(),
        "prediction": None if predicted is None else predicted.to_dict(),
    }


def _of_kind(measured: MeasuredCell, kind: Kind) -> Record | None:
    return next((record for record in measured.arms if record.arm.kind is kind and record.scored), None)
