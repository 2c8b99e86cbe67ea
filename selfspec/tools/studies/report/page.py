"""One self-contained HTML page of a study: interactive pictures by plotly, its script embedded, and the texts."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.files.writing import whole
from selfspec.model.layer_path import Part
from selfspec.tools.studies.report.files import KEPT, described
from selfspec.tools.studies.report.panels import Panel, coloured
from selfspec.tools.studies.report.pictures import COLOURS, row_agrees
from selfspec.tools.studies.report.tokens import GREY, LINE_END, NONE, printable
from selfspec.tools.studies.run import Finding
from selfspec.tools.studies.table import Row

if TYPE_CHECKING:
    import plotly.graph_objects as go

_DRAFTS, _TEXTS = 6, 4
_HEIGHT = 420
_SYMBOLS = {"exit": "circle", "skip": "square", "skip-file": "diamond", "head": "triangle-up"}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px } th, td { padding: .2em .7em; text-align: right }
th:first-child, td:first-child { text-align: left } tr:nth-child(even) { background: #f4f4f4 }
pre.text { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; border: 1px solid #ddd; padding: .7em }
span.key { padding: .1em .5em; margin-right: .5em } details { margin: 1em 0 } h2 { margin-top: 2em }
"""


def write_page(finding: Finding, panels: Sequence[Panel], file: Path) -> Path:
    """Write the page of a study.

    Raises:
        StorageError: it cannot be written.
    """
    parts = [f"<h1>{html.escape(finding.study.name)}</h1>", _summary(finding)]
    script: bool = True
    for panel in panels:
        parts.append(f"<h2>{html.escape(panel.title)}</h2>")
        parts.append(_best(panel))
        for draw, has in _PICTURES:
            if has(panel):
                figure = draw(panel)
                figure.update_layout(height=_HEIGHT, margin={"t": 50, "b": 50}, template="plotly_white")
                parts.append(figure.to_html(full_html=False, include_plotlyjs=script, div_id=f"picture-{len(parts)}"))
                script = False
        parts.append(_texts(panel))
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(finding.study.name)}</title>"
        f"<style>{_STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )
    with whole(file, KEPT) as draft:
        draft.write_text(page, encoding="utf-8")
    return file


def _summary(finding: Finding) -> str:
    import json

    about = described(finding)
    failed = "".join(
        f"<li>{html.escape(str(each['point']['place']))}: {html.escape(str(each['error']))}</li>"
        for each in about["failed"]
    )
    shown = html.escape(json.dumps({name: about[name] for name in ("study", "environments", "prices")}, indent=1))
    return (
        f"<p>{about['points']} points, {about['seconds']:.0f} seconds of work, {len(about['failed'])} failed.</p>"
        f"<ul>{failed}</ul><details><summary>Study, environment and prices</summary><pre>{shown}</pre></details>"
    )


def _best(panel: Panel) -> str:
    names = {
        "draft_length": "draft length",
        "alpha": "acceptance",
        "c": "c",
        "predicted_speedup": "predicted speed-up",
        "measured_acceptance_rate": "measured acceptance rate",
        "measured_speedup_median": "measured speed-up",
    }
    lines = []
    for row in sorted(panel.best, key=lambda row: -row["predicted_speedup"])[:10]:
        cells = "".join(f"<td>{_cell(row.get(name))}</td>" for name in names)
        lines.append(f"<tr><td>{html.escape(row['draft'])}</td>{cells}</tr>")
    head = "".join(f"<th>{name}</th>" for name in names.values())
    return f"<table><tr><th>draft</th>{head}</tr>{''.join(lines)}</table>"


def _cell(value: Any) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"


def _label(row: Row) -> str:
    """The name of a draft for a picture: plotly takes tags in texts for its own."""
    return html.escape(row["draft"], quote=False)


def _importance(panel: Panel) -> go.Figure:
    import plotly.graph_objects as go

    single, layers = panel.single, panel.whole_layers
    depth = 1 + max([each.layer for each in single] + list(layers))
    names = [part.name.lower() for part in Part if any(each.part == part for each in single)]
    values: list[list[float | None]] = [
        [
            next((value for each, value in single.items() if (each.layer, each.part) == (layer, part)), None)
            for layer in range(depth)
        ]
        for part in Part
        if any(each.part == part for each in single)
    ]
    if layers:
        names.append("both")
        values.append([layers.get(layer) for layer in range(depth)])
    shown = [["" if value is None else f"{value:.2f}" for value in row] for row in values]
    heat = go.Heatmap(z=values, y=names, text=shown, texttemplate="%{text}", zmin=0, zmax=1, colorscale="Viridis")
    figure = go.Figure(heat)
    figure.update_layout(title="Acceptance with one sublayer left out", xaxis_title="layer")
    figure.update_yaxes(autorange="reversed")
    return figure


def _positions(panel: Panel) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    longest = {row["draft"]: row for row in panel.rows if row.get("acceptance_by_position")}
    measured = {row["draft"]: row for row in panel.confirmed}
    for index, best in enumerate(panel.promising(_DRAFTS)):
        row, colour = longest[best["draft"]], COLOURS[index % len(COLOURS)]
        for prefix, source, mode, dash in (
            ("", row, "lines", "solid"),
            ("measured_", measured.get(row["draft"]), "markers", "dot"),
        ):
            if source is None:
                continue
            shares = source[f"{prefix}acceptance_by_position"]
            known = [at for at, share in enumerate(shares) if share is not None]
            high, low = (source[f"{prefix}acceptance_by_position_{end}"] for end in ("high", "low"))
            figure.add_scatter(
                x=[at + 1 for at in known],
                y=[shares[at] for at in known],
                error_y={
                    "type": "data",
                    "array": [high[at] - shares[at] for at in known],
                    "arrayminus": [shares[at] - low[at] for at in known],
                    "thickness": 1,
                },
                mode=mode,
                line={"color": colour, "dash": dash},
                marker={"color": colour, "size": 8},
                name=_label(row) + (", measured" if prefix else ""),
            )
    figure.update_layout(title="Acceptance by position in the draft", xaxis_title="position", yaxis_range=[0, 1.02])
    figure.update_xaxes(dtick=1)
    return figure


def _exits(panel: Panel) -> go.Figure:
    import plotly.graph_objects as go

    exits = panel.exits
    layers, lengths = sorted({layer for layer, _ in exits}), sorted({length for _, length in exits})
    values = [[exits[layer, length]["predicted_speedup"] for layer in layers] for length in lengths]
    best = max(exits, key=lambda place: exits[place]["predicted_speedup"])
    x, y = [str(layer) for layer in layers], [str(length) for length in lengths]
    figure = go.Figure(
        go.Heatmap(z=values, x=x, y=y, colorscale="Viridis", texttemplate="%{z:.2f}", colorbar={"title": "speed-up"})
    )
    figure.add_scatter(
        x=[str(best[0])],
        y=[str(best[1])],
        mode="markers",
        marker={"symbol": "square-open", "size": 38, "color": COLOURS[1], "line": {"width": 3}},
        name="predicted optimum",
    )
    figure.update_layout(
        title="Predicted speed-up of early exits", xaxis_title="exit layer", yaxis_title="draft length"
    )
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="category")
    return figure


def _pareto(panel: Panel) -> go.Figure:
    import plotly.graph_objects as go

    best = panel.best
    speeds = [row["predicted_speedup"] for row in best]
    figure = go.Figure()
    for kind in dict.fromkeys(row["kind"] for row in best):
        rows = [row for row in best if row["kind"] == kind]
        figure.add_scatter(
            x=[row["c"] for row in rows],
            y=[row["alpha"] for row in rows],
            mode="markers",
            name=kind,
            text=[f"{_label(row)}<br>{row['predicted_speedup']:.2f}x at {row['draft_length']}" for row in rows],
            marker={
                "symbol": _SYMBOLS.get(kind, "x"),
                "size": 9,
                "color": [row["predicted_speedup"] for row in rows],
                "coloraxis": "coloraxis",
            },
        )
    front = panel.front
    figure.add_scatter(
        x=[row["c"] for row in front],
        y=[row["alpha"] for row in front],
        mode="lines",
        line={"shape": "hv", "color": "#555", "width": 1},
        name="Pareto front",
    )
    figure.update_layout(
        title="Acceptance against cost",
        xaxis_title="draft cost ratio c",
        yaxis_title="acceptance",
        coloraxis={
            "colorscale": "Viridis",
            "cmin": min(speeds),
            "cmax": max(speeds),
            "colorbar": {"title": "speed-up"},
        },
        legend={"orientation": "h", "y": -0.2},
    )
    return figure


def _agreement(panel: Panel) -> go.Figure:
    import plotly.graph_objects as go

    rows = panel.confirmed
    figure = go.Figure()
    figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", line={"color": "#999", "width": 1}, showlegend=False)
    bars = {}
    for axis, name in (("x", "acceptance_rate"), ("y", "measured_acceptance_rate")):
        bars[f"error_{axis}"] = {
            "type": "data",
            "array": [row[f"{name}_high"] - row[name] for row in rows],
            "arrayminus": [row[name] - row[f"{name}_low"] for row in rows],
            "thickness": 1,
        }
    figure.add_scatter(
        x=[row["acceptance_rate"] for row in rows],
        y=[row["measured_acceptance_rate"] for row in rows],
        mode="markers",
        text=[_label(row) for row in rows],
        showlegend=False,
        **bars,
    )
    within = sum(map(row_agrees, rows))
    figure.update_layout(
        title=f"Estimate against measurement: {within} of {len(rows)} within the 95 % interval",
        xaxis_title="estimated acceptance rate",
        yaxis_title="measured by generation",
    )
    return figure


def _texts(panel: Panel) -> str:
    drafts = [row["draft"] for row in panel.promising(_DRAFTS)]
    if not drafts:
        return ""
    keys = [*zip(drafts, COLOURS, strict=False), (NONE, GREY)]
    parts = ["<h3>Cheapest draft that would have been right</h3><p>"]
    parts += [f'<span class=key style="background:{colour}66">{html.escape(name)}</span>' for name, colour in keys]
    parts.append("</p>")
    for number, text in enumerate(panel.tokens[:_TEXTS]):
        spans = []
        for at, (token, index) in enumerate(zip(text, coloured(panel, drafts, number), strict=True)):
            colour = GREY if index is None else COLOURS[index % len(COLOURS)]
            right = [draft for draft in drafts if panel.right[draft][number][at] == "1"]
            shown = html.escape(printable(token)).replace(LINE_END, f"{LINE_END}\n")
            spans.append(
                f'<span style="background:{colour}66" title="{html.escape(", ".join(right) or NONE)}">{shown}</span>'
            )
        parts.append(f"<pre class=text>{''.join(spans)}</pre>")
    return "".join(parts)


_PICTURES: tuple[tuple[Callable[[Panel], Any], Callable[[Panel], bool]], ...] = (
    (_importance, lambda panel: bool(panel.single or panel.whole_layers)),
    (_positions, lambda panel: bool(panel.best)),
    (_exits, lambda panel: bool(panel.exits)),
    (_pareto, lambda panel: bool(panel.best)),
    (_agreement, lambda panel: bool(panel.confirmed)),
)
