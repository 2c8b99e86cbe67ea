"""The report of a study: sentences, pictures, tables, and texts coloured by the drafts that would have been right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from selfspec.measure.palette import PALE, SEQUENCE
from selfspec.tools.lab.ablation import Finding
from selfspec.tools.lab.findings import TextFindings, findings, names_of, timing_doubts
from selfspec.tools.lab.report import Report, write_data
from selfspec.tools.lab.study_pictures import draw
from selfspec.tools.lab.table import Row, estimate_in

# Drafts that colour a text, texts that are shown, and drafts of a table; the file of points has all.
_COLOURS, _TEXTS, _DRAFTS = 6, 4, 40
_SPEEDS = ("predicted_speedup", "measured_speedup")
_NONE = "only the full model"
_LINE_END = "↵"


def write_report(finding: Finding, folder: Path) -> list[Path]:
    """Write everything there is to see of a study into a folder, and return the files."""
    shown = findings(finding)
    pictures = draw(shown, folder)
    data = write_data(finding.table, described(finding), folder, "points")
    return [*data, *pictures, *page(finding, shown, pictures).write(folder)]


def page(finding: Finding, shown: Sequence[TextFindings], pictures: Sequence[Path]) -> Report:
    """Return the report."""
    report = Report(f"Study of drafts: {', '.join(names_of(finding.table).values()) or 'no model'}")
    report.points([each.sentence() for each in shown if each.best])
    about = described(finding)
    report.paragraph(
        f"{about['points']} points, {about['seconds']:.0f} seconds of work, {len(about['failed'])} failed."
    )
    report.points([f"{', '.join(map(str, each['place'].values()))}: {each['error']}" for each in about["failed"]])
    report.table(["declared", ""], [[name, _listed(value)] for name, value in about["study"].items()])
    for around in about["environments"]:
        report.table(["made with", ""], [[name, str(value)] for name, value in around.items() if value is not None])
    report.points(timing_doubts(finding))
    for picture in pictures:
        report.picture(picture)
    for each in shown:
        report.heading(each.title)
        report.points(each.doubts)
        report.table(["draft", "draft length", "acceptance", "c", "predicted", "measured"], _rows(each.best[:_DRAFTS]))
        if len(each.best) > _DRAFTS:
            report.paragraph(f"The best {_DRAFTS} of {len(each.best)} drafts, each at its best draft length.")
        report.coloured(_texts(each))
    return report


def described(finding: Finding) -> dict[str, Any]:
    """Describe a study, ready for JSON: how it was declared, with what it was made, and what failed."""
    environments = {json.dumps(dict(run.environment), sort_keys=True) for run in finding.runs if run.environment}
    declared = asdict(finding.study)
    # Where files lie is nobody's concern.
    declared["models"] = [Path(model).name for model in declared["models"]]
    workloads = [each.partition("=") for each in declared["workloads"]]
    declared["workloads"] = [name + named + place.rpartition("/")[2] for name, named, place in workloads]
    return {
        "study": declared,
        "environments": [json.loads(each) for each in sorted(environments)],
        "points": len(finding.runs),
        "seconds": sum(run.seconds for run in finding.runs),
        "failed": [{"place": dict(run.asked.place), "error": run.error} for run in finding.failed],
    }


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _rows(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [row["draft"], str(row["draft_length"]), *(_shown(row, name) for name in ("alpha", "c", *_SPEEDS))]
        for row in rows
    ]


def _shown(row: Row, name: str) -> str:
    if row.get(name) is None:
        return ""
    return estimate_in(row, name).shown(2)


def _texts(found: TextFindings) -> str:
    """Colour texts by the cheapest draft that would have been right; all that would have been are under the pointer."""
    drafts = [row["draft"] for row in found.promising(_COLOURS) if row["draft"] in found.right]
    if not drafts:
        return ""
    colours = [f"{colour}66" for colour in (*SEQUENCE[: len(drafts)], PALE)]
    keys = [
        f'<span class=key style="background:{colour}">{escape(name)}</span>'
        for name, colour in zip((*drafts, _NONE), colours, strict=True)
    ]
    parts = [f"<h3>Cheapest draft that would have been right</h3><p>{''.join(keys)}</p>"]
    for number, text in enumerate(found.tokens[:_TEXTS]):
        spans = []
        for at, (token, index) in enumerate(zip(text, found.cheapest_right(drafts, number), strict=True)):
            right = ", ".join(draft for draft in drafts if found.right[draft][number][at] == "1") or _NONE
            shown = escape(printable(token)).replace(_LINE_END, f"{_LINE_END}\n")
            spans.append(f'<span style="background:{colours[index]}" title="{escape(right)}">{shown}</span>')
        parts.append(f"<pre class=text>{''.join(spans)}</pre>")
    return "".join(parts)


def printable(token: str) -> str:
    """Return a token with everything visible but spaces."""
    shown = token.replace("\r", "").replace("\t", "    ").replace("\n", _LINE_END)
    return "".join(letter if letter.isprintable() else "·" for letter in shown)
