"""The report of a study: data, pictures, and one HTML page of them, an interactive picture and the coloured texts."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from selfspec.files.writing import whole
from selfspec.measure.palette import PALE, SEQUENCE
from selfspec.tools.studies.report.files import KEPT, described, write_data
from selfspec.tools.studies.report.panels import Panel, panels
from selfspec.tools.studies.report.pictures import draw_all
from selfspec.tools.studies.run import Finding
from selfspec.tools.studies.table import SPEEDS, Row

# Drafts that colour a text, and texts of a panel.
_DRAFTS, _TEXTS = 6, 4
_FIGURES = ("draft_length", "alpha", "c", "measured_acceptance_rate", *SPEEDS)
_COLUMNS = {name: name.replace("_", " ") for name in ("draft", *_FIGURES)}
_SHAPES = ("draft", "draft_length", "nodes", "rule", "measured_mean_accepted_length", "measured_speedup_median")
_NONE = "only the full model"
_LINE_END = "↵"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px } th, td { padding: .2em .7em; text-align: right }
th:first-child, td:first-child { text-align: left } tr:nth-child(even) { background: #f4f4f4 } img { max-width: 100% }
pre.text { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; border: 1px solid #ddd; padding: .7em }
div.table { max-height: 32em; overflow: auto; border: 1px solid #ddd } th { position: sticky; top: 0; background: #fff }
span.key { padding: .1em .5em; margin-right: .5em } details { margin: 1em 0 } h2 { margin-top: 2em }
"""


def write_report(finding: Finding, folder: Path) -> list[Path]:
    """Write everything there is to see of a study into a folder, and return the files."""
    shown = panels(finding)
    data, pictures = write_data(finding, folder), draw_all(shown, folder)
    return [*data, *pictures, write_page(finding, shown, pictures, folder / "report.html")]


def write_page(finding: Finding, shown: Sequence[Panel], pictures: Sequence[Path], file: Path) -> Path:
    """Write the page of a study, with its pictures inside."""
    name = escape(f"Study of drafts: {', '.join(dict.fromkeys(row['model'] for row in finding.table)) or 'no model'}")
    parts = [f"<h1>{name}</h1>", _findings(shown), _summary(finding)]
    if any(panel.best for panel in shown):
        parts.append(f"<h2>Acceptance against cost</h2>{_all_drafts(shown)}")
    for picture in pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        title = picture.stem.replace("_", " ").capitalize()
        parts.append(f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{data}">')
    parts += [f"<h2>{escape(panel.title)}</h2>{_best(panel)}{_shapes(panel)}{_texts(panel)}" for panel in shown]
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{name}</title>"
        f"<style>{_STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )
    with whole(file, KEPT) as draft:
        draft.write_text(page, encoding="utf-8")
    return file


def _findings(shown: Sequence[Panel]) -> str:
    """Say in a sentence for each panel which draft promises most, and what generation made of it."""
    return f"<ul>{''.join(f'<li>{escape(finding_of(panel))}</li>' for panel in shown if panel.best)}</ul>"


def finding_of(panel: Panel) -> str:
    """What a panel comes to, in a sentence or two; its `best` is not empty."""
    top = panel.best[0]
    predicted = top["predicted_speedup"]
    length = top["draft_length"]
    draft = f"{top['draft']} with {length} draft token{'s' * (length != 1)}"
    if predicted > 1:
        said = (
            f"{draft} promises most, {predicted:.2f} times the speed of plain decoding (acceptance {top['alpha']:.2f})"
        )
    else:
        said = f"no draft promises to beat plain decoding; the nearest is {draft}, with {predicted:.2f} times its speed"
    measured = max((row["measured_speedup_median"] for row in panel.confirmed), default=None)
    if measured is not None:
        fastest = next(row for row in panel.confirmed if row["measured_speedup_median"] == measured)
        named = f"{fastest['draft']} with {fastest['draft_length']}"
        said += f". Of {len(panel.confirmed)} confirmed by generation the fastest was {named}, at {measured:.2f} times"
    return f"{panel.title}: {said}."


def _summary(finding: Finding) -> str:
    about = described(finding)
    failed = "".join(
        f"<li>{escape(str(each['point']['place']))}: {escape(str(each['error']))}</li>" for each in about["failed"]
    )
    shown = escape(json.dumps({name: about[name] for name in ("study", "environments", "prices")}, indent=1))
    return (
        f"<p>{about['points']} points, {about['seconds']:.0f} seconds of work, {len(about['failed'])} failed.</p>"
        f"<ul>{failed}</ul><details><summary>Study, environment and prices</summary><pre>{shown}</pre></details>"
    )


def _all_drafts(shown: Sequence[Panel]) -> str:
    """Draw every draft at its best draft length, with its name and figures under the pointer."""
    import pandas
    import plotly.express

    # Plotly obeys tags in texts.
    rows = [
        {**row, "panel": escape(panel.title), "draft": escape(row["draft"])} for panel in shown for row in panel.best
    ]
    figure = plotly.express.scatter(
        pandas.DataFrame(rows).reindex(columns=["panel", "kind", *_COLUMNS]),
        x="c",
        y="alpha",
        color="predicted_speedup",
        symbol="kind",
        facet_col="panel",
        facet_col_wrap=2,
        hover_name="draft",
        hover_data=list(_FIGURES),
        labels={**_COLUMNS, "panel": ""},
        color_continuous_scale="Cividis",
        template="plotly_white",
        height=420 * -(-len(shown) // 2),
    )
    figure.for_each_annotation(lambda each: each.update(text=each.text.removeprefix("=")))
    figure.update_layout(legend={"orientation": "h", "y": -0.15}, coloraxis_colorbar={"title": "speed-up"})
    return str(figure.to_html(full_html=False, include_plotlyjs=True, div_id="all-drafts"))


def _best(panel: Panel) -> str:
    return (
        f"<h3>All {len(panel.best)} drafts, each at its best draft length</h3>"
        f"<div class=table>{_table(panel.best, list(_COLUMNS))}</div>"
    )


def _shapes(panel: Panel) -> str:
    return f"<h3>Trees beside chains</h3>{_table(panel.shapes, _SHAPES)}" if panel.shapes else ""


def _table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    import pandas

    named = {name: name.replace("_", " ") for name in columns}
    table = pandas.DataFrame(rows).reindex(columns=list(columns)).astype(object).rename(columns=named)
    with pandas.option_context("display.max_colwidth", None):
        return str(table.to_html(index=False, border=0, na_rep="", float_format="{:.2f}".format))


def _texts(panel: Panel) -> str:
    """Colour texts by the cheapest draft that would have been right; all that would have been are under the pointer."""
    drafts = [row["draft"] for row in panel.promising(_DRAFTS)]
    if not drafts:
        return ""
    colours = [f"{colour}66" for colour in (*SEQUENCE[: len(drafts)], PALE)]
    keys = [
        f'<span class=key style="background:{colour}">{escape(name)}</span>'
        for name, colour in zip((*drafts, _NONE), colours, strict=True)
    ]
    parts = [f"<h3>Cheapest draft that would have been right</h3><p>{''.join(keys)}</p>"]
    for number, text in enumerate(panel.tokens[:_TEXTS]):
        spans = []
        for at, (token, index) in enumerate(zip(text, panel.cheapest_right(drafts, number), strict=True)):
            right = ", ".join(draft for draft in drafts if panel.right[draft][number][at] == "1") or _NONE
            shown = escape(printable(token)).replace(_LINE_END, f"{_LINE_END}\n")
            spans.append(f'<span style="background:{colours[index]}" title="{escape(right)}">{shown}</span>')
        parts.append(f"<pre class=text>{''.join(spans)}</pre>")
    return "".join(parts)


def printable(token: str) -> str:
    """Return a token with everything visible but spaces."""
    shown = token.replace("\r", "").replace("\t", "    ").replace("\n", _LINE_END)
    return "".join(letter if letter.isprintable() else "·" for letter in shown)
