"""Report what the lab measured: a page of Markdown with its pictures, and the table as CSV and Parquet."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.errors import BenchError, StudyError
from selfspec.files.writing import whole
from selfspec.tools.lab.plot import plot
from selfspec.tools.lab.runs import Row
from selfspec.tools.lab.table import by_conditions, doubts, records, shown, summarise

if TYPE_CHECKING:
    from pandas import DataFrame

REPORT, TABLE = "report.md", "table"
"""Files of a report: the page, and the table."""

PROVENANCE = (
    "model", "weights", "parameters", "dtype", "prompts", "seed", "selfspec", "commit", "torch", "transformers",
    "python", "processor", "device", "threads", "cpu_kernels", "runtime",
)  # fmt: skip
"""Columns that say what was measured, and with what."""

_KEPT = "what was measured is kept: make room and repeat the command"
# Columns of the page, as far as there are figures; all others are in the table's files.
_SHOWN = (
    *("arm", "measured", "draft_length", "n", "acceptance_rate", "alpha", "mean_accepted_length", "drafting_share"),
    *("c", "predicted_speedup", "speedup", "speedup_over_generate", "tokens_per_second", "equal"),
    *("perplexity_ratio", "perplexity_p", "refused", "absence", "error"),
)
_MOST = 40
# Drafts that have a line each in pictures, panels of a page, and its width in inches.
_FEW, _PANELS, _PAGE = 12, 6, 7.2
_NOTES = (
    "Each figure is followed by its 95 % interval over texts (Student's t over a jackknife), of which there are n. "
    "docs/columns.md defines every column."
)
_SPECIAL = re.compile(r"[\\`*\[\]<>|~&#$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# What makes a list of a line that begins with it.
_BEGINNING = re.compile(r"^(\d*)([-+.)])(?= )")


def require_packages() -> None:
    """Refuse before work starts what could not be reported."""
    missing = [name for name in ("matplotlib", "pandas", "pyarrow") if find_spec(name) is None]
    if missing:
        raise BenchError(f"reports need {' and '.join(missing)}; pip install 'selfspec[bench]'")


def write_report(heading: str, rows: Sequence[Row], about: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the page, the pictures and the tables of some rows into a folder, and return the files."""
    table = summarise(rows)
    table = table[table["decoder"] != "plain"] if "texts" in table and "decoder" in table else table
    pictures = draw(table, folder)
    parts = [f"# {escaped(heading)}", escaped(_NOTES)]
    parts += [
        markdown_table(["measured", "with"], [[name, str(value)] for name, value in each.items()])
        for each in provenances(rows)
    ]
    if about:
        listed = {name: value if isinstance(value, tuple | list) else [value] for name, value in about.items()}
        said = [[name, ", ".join(map(str, each))] for name, each in listed.items()]
        parts.append(markdown_table(["declared", ""], said))
    found = doubts(table)
    if found:
        parts.append("\n".join(f"- {escaped(each)}" for each in found))
    for name, lines in by_conditions(table):
        parts += [f"## {escaped(name)}", *page_of(best_first(lines))]
    parts += [f"![{file.stem}]({file.name})" for file in pictures]
    with whole(folder / REPORT, _KEPT) as draft:
        draft.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    made_with = {"declared": about, "provenance": provenances(rows)}
    return [folder / REPORT, *pictures, *write_data(table, made_with, folder / TABLE)]


def provenances(rows: Sequence[Row]) -> list[Row]:
    """Return the models, versions and settings that rows were measured with, once each, with all prompts of each."""
    seeds = sorted({row["seed"] for row in rows if isinstance(row.get("seed"), int)})
    every: dict[str, Row] = {}
    prompts: dict[str, dict[str, None]] = {}
    for row in rows:
        each = {name: row[name] for name in PROVENANCE if row.get(name) is not None and name != "seed"}
        identity = json.dumps([each.get(name) for name in ("model", "weights", "commit", "threads")])
        every[identity] = {**every.get(identity, {}), **each}
        if "prompts" in each:
            prompts.setdefault(identity, {})[each["prompts"]] = None
    for identity, read in prompts.items():
        every[identity]["prompts"] = ", ".join(read)
    return [{**each, "seeds": f"{seeds[0]} to {seeds[-1]}" if seeds else "none"} for each in every.values()]


def best_first(lines: DataFrame) -> list[Row]:
    """Return the lines of a table at the draft lengths that promise most, the most promising first."""
    rows = records(lines)
    if any("best_length" in row for row in rows):
        confirmed = [row for row in rows if "speedup" in row]
        best = [row for row in rows if row.get("best_length") and "speedup" not in row]
        best.sort(key=lambda row: -row.get("predicted_speedup", 0.0))
        rows = [*confirmed, *best, *(row for row in rows if "error" in row)]
    return rows


def page_of(rows: Sequence[Row]) -> list[str]:
    """Return a table of Markdown with the columns that there are figures for."""
    always = ("arm", "n")
    columns = [
        name
        for name in _SHOWN
        if any(row.get(name) is not None for row in rows)
        and (name in always or len(rows) == 1 or len({str(row.get(name)) for row in rows}) > 1)
    ]
    lines = [[shown(row, name) for name in columns] for row in rows[:_MOST]]
    rest = [f"The first {_MOST} of {len(rows)} lines; table.csv has the rest."] if len(rows) > _MOST else []
    return [markdown_table([name.replace("_", " ") for name in columns], lines), *rest]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts as Markdown, whatever they hold."""
    lines = [list(map(escaped, head)), ["---"] * len(head), *(map(escaped, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escaped(text: str) -> str:
    """Return a text as Markdown that shows it in one line: no markup, no HTML, no end of a table's cell."""
    line = "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(text.split()))
    return _BEGINNING.sub(r"\1\\\2", _SPECIAL.sub(r"\\\g<0>", line))


def write_data(frame: DataFrame, about: Mapping[str, Any], place: Path) -> list[Path]:
    """Write a table as Parquet, which also holds what it was made with, and as CSV with lists as JSON."""
    import pyarrow
    from pyarrow import parquet

    as_json = frame.map(lambda value: json.dumps(value) if isinstance(value, list | dict) else value)
    with whole(place.with_suffix(".csv"), _KEPT) as draft:
        draft.write_text(as_json.to_csv(index=False, float_format="%.6g", lineterminator="\n"), encoding="utf-8")
    data = pyarrow.Table.from_pandas(frame, preserve_index=False)
    with whole(place.with_suffix(".parquet"), _KEPT) as draft:
        parquet.write_table(data.replace_schema_metadata({"selfspec": json.dumps(about, default=str)}), draft)
    return [place.with_suffix(".parquet"), place.with_suffix(".csv")]


def draw(table: DataFrame, folder: Path) -> list[Path]:
    """Draw the usual pictures that a table has figures for; return the files of PNG, beside which PDFs lie."""
    if table.empty:
        return []
    drafts = table[table["draft"].notna()] if "draft" in table else table
    timed = "speedup_over_generate" in table
    settings: dict[str, dict[str, Any]] = {
        "speed": {"x": "speedup_over_generate" if timed else "speedup", "y": "arm"},
        "tokens": {"x": "mean_accepted_length", "y": "arm"},
        "importance": {"x": "layer", "y": "alpha", "by": "part"},
        "exits": {"x": "exit", "y": "predicted_speedup", "by": "draft_length"},
        "cost": {"x": "c", "y": "alpha", "by": "kind"},
        "positions": {"x": "position", "y": "accepted", "by": "arm"},
    }
    found, many = [], table["conditions"].nunique() > _PANELS
    for name, how in settings.items():
        if many and how["y"] != "arm":
            continue
        lines = table if name == "speed" else drafts
        # Of a study with many drafts, those of each kind that promise most.
        if name in ("tokens", "positions") and len(lines) > _FEW and "best_length" in lines:
            best = lines[lines["best_length"]].drop_duplicates(["conditions", "draft"])
            best = best.sort_values("predicted_speedup", ascending=False)
            lines = best.groupby(["conditions", "kind"], sort=False).head(2).sort_values("conditions")
        if name in ("importance", "exits", "cost") and "best_length" in lines:
            lines = lines[lines["measured"] == "teacher forcing"] if name != "cost" else lines[lines["best_length"]]
            lines = lines.drop_duplicates(["conditions", "draft"]) if name == "importance" else lines
        # Of more conditions than a page has room for, a column each.
        if many and how["y"] == "arm":
            how = {"x": "conditions", "y": "arm", "colour": how["x"], "width": _PAGE}
        try:
            figure = plot(lines, panel=None if many else "conditions", to=folder / f"{name}.pdf", **how)
        except StudyError:
            # There are no such figures.
            continue
        with whole(folder / f"{name}.png", _KEPT) as draft:
            figure.savefig(draft, dpi=300)
        found.append(folder / f"{name}.png")
    return found
