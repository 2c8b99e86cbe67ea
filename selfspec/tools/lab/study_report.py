"""Report a study: sentences, pictures, tables, and texts coloured by the drafts that would have been right."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.measure.estimate import Estimate
from selfspec.tools.lab.ablation import Finding
from selfspec.tools.lab.drafts import skip_set
from selfspec.tools.lab.report import (
    PALE,
    SEQUENCE,
    VERMILION,
    Mark,
    Panel,
    Picture,
    Report,
    by_layer,
    curves,
    interval,
    mark_of,
    marks_of,
    write_data,
)
from selfspec.tools.lab.runs import told_apart
from selfspec.tools.lab.table import Row, estimate_in, pareto_front


@dataclass(frozen=True)
class TextFindings:
    """Findings for one model on one text at one temperature; `tokens` are the texts as shown, token by token.

    `right` has, by draft that was judged by teacher forcing, for each text a digit for each token: 1 where it was
    right.
    """

    title: str
    rows: Sequence[Row]
    tokens: Sequence[Sequence[str]]
    right: Mapping[str, Sequence[str]]

    @property
    def best(self) -> list[Row]:
        """Drafts at their best draft lengths, as far as these are known; the most promising first."""
        return sorted((row for row in self.rows if row.get("best_length")), key=lambda row: -row["predicted_speedup"])

    @property
    def stepping(self) -> list[Row]:
        """Return those of the best all of whose tokens take a step: acceptance and c say what these are worth."""
        return [row for row in self.best if row["stepped_share"] == 1 and row["alpha"] is not None]

    @property
    def importance(self) -> dict[str, dict[int, Estimate]]:
        """Acceptance with one sublayer or one layer left out, by `attention`, `MLP` or `both`, and by layer."""
        found: dict[str, dict[int, Estimate]] = {"attention": {}, "MLP": {}, "both": {}}
        for row in self.rows:
            skipped = sorted(skip_set(row["draft"])) if row["kind"] == "skip" and row.get("alpha") is not None else []
            if len({each.layer for each in skipped}) == 1:
                left_out = "both" if len(skipped) > 1 else ("attention", "MLP")[skipped[0].part]
                found[left_out][skipped[0].layer] = estimate_in(row, "alpha")
        return {left_out: layers for left_out, layers in found.items() if layers}

    @property
    def exits(self) -> dict[int, dict[int, Estimate]]:
        """Predicted speed-ups of plain exits, by draft length and layer."""
        found: dict[int, dict[int, Estimate]] = {}
        for row in self.rows:
            if row["kind"] == "exit" and "predicted_speedup" in row:
                layer = int(row["draft"].removeprefix("exit:"))
                found.setdefault(row["draft_length"], {})[layer] = estimate_in(row, "predicted_speedup")
        return found

    @property
    def confirmed(self) -> list[Row]:
        """Rows that were both estimated and measured."""
        both = ("measured_acceptance_rate", "acceptance_rate")
        return [row for row in self.rows if all(row.get(name) is not None for name in both)]

    @property
    def estimated_and_measured(self) -> list[Row]:
        """Return the rows whose estimates do not come from generations themselves."""
        return [row for row in self.confirmed if row["judged_by"] == "teacher forcing"]

    @property
    def doubts(self) -> list[str]:
        """Say which figures cannot be, or say less than they seem to."""
        found = []
        if self.tokens and len(self.tokens) == 1:
            found.append("there is one text, so acceptance has no interval; give more texts")
        for row in self.confirmed:
            doubt = estimate_in(row, "measured_speedup").doubt(row["measured_mean_accepted_length"])
            if doubt is not None:
                found.append(f"{_named(row)}: {doubt}")
        return found

    def promising(self, count: int) -> list[Row]:
        """Return the most promising drafts of each kind in turns, at their best draft lengths; cheapest first."""
        by_kind: dict[str, list[Row]] = {}
        for row in self.best:
            by_kind.setdefault(row["kind"], []).append(row)
        mixed = [rows[turn] for turn in range(count) for rows in by_kind.values() if turn < len(rows)]
        return sorted(mixed[:count], key=lambda row: row["c"])

    def cheapest_right(self, drafts: Sequence[str], text: int) -> list[int]:
        """Return, for each token of a text, the first of some drafts that would have been right; -1: none."""
        return ["".join(marks).find("1") for marks in zip(*(self.right[each][text] for each in drafts), strict=True)]

    def sentence(self) -> str:
        """Say how fast the best draft is: measured where drafts were confirmed, else predicted. There is a draft."""
        if self.confirmed:
            row = max(self.confirmed, key=lambda row: float(row["measured_speedup_median"]))
            speed, of = row["measured_speedup_median"], f"the fastest of {len(self.confirmed)} confirmed by generation"
            if speed <= 1:
                said = f"no draft beat plain decoding here; {_named(row)}, {of}, came to {speed:.2f}"
            else:
                said = f"{_named(row)}, {of}: measured {speed:.2f} and predicted {_predicted(row)} times plain decoding"
        elif self.best[0]["predicted_speedup"] > 1:
            row = self.best[0]
            said = f"{_named(row)} is predicted {_predicted(row)} times plain decoding"
        else:
            row = self.best[0]
            said = f"no draft is predicted to beat plain decoding; {_named(row)} comes to {_predicted(row)}"
        return f"{self.title}: {said}."


def _named(row: Row) -> str:
    length = row["draft_length"]
    return f"{row['draft']} with {length} draft token{'s' * (length != 1)}"


def _predicted(row: Row) -> str:
    return estimate_in(row, "predicted_speedup").shown(2)


def timing_doubts(finding: Finding) -> list[str]:
    """Say which times of a study were taken beside other work, a sentence for each kind."""
    kinds = {"confirm": "confirming drafts"}
    if finding.study.pricing == "measured":
        kinds = {"costs": "timing costs", **kinds}
    found = {}
    for kind, words in kinds.items():
        runs = [run for run in finding.runs if run.asked.kind == kind and run.doubt is not None]
        if runs:
            busiest = min(
                runs, key=lambda run: math.inf if run.load is None or run.load.free is None else run.load.free
            )
            found[words] = f"while {words} {busiest.doubt}"
    return list(found.values())


def names_of(table: Sequence[Row]) -> dict[tuple[str, str], str]:
    """Return the report names of the models of a table, by name and weights."""
    return told_apart((row["model"], row["weights"]) for row in table)


def findings(finding: Finding) -> list[TextFindings]:
    """Return the findings of a study for each model, text and temperature, in its order."""
    texts = {run.asked.key: run for run in finding.runs if run.asked.kind == "texts"}
    estimates = [run for run in finding.runs if run.asked.kind == "estimate" and run.error is None]
    called, found = names_of(finding.table), []
    for (model, workload, temperature), rows in groupby(
        finding.table, lambda row: ((row["model"], row["weights"]), row["workload"], row["temperature"])
    ):
        place: dict[str, Any] = {"weights": model[1], "workload": workload, "temperature": temperature}
        here = [each for each in estimates if place.items() <= each.asked.place.items()]
        if here:
            how = f"temperature {temperature:g}" if temperature else "greedy"
            tokens = texts[here[0].asked.under["texts"]].found["tokens"]
            right = {each.asked.place["draft"]: each.found["right"] for each in here if "right" in each.found}
            found.append(TextFindings(f"{called[model]}, {workload}, {how}", list(rows), tokens, right))
    return found


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


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Drafts that have a line each, and labelled drafts of a front; colours and markers of lines that are no drafts.
_DRAWN, _LABELS = 5, 5
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
        rows = {row["draft"]: row for row in each.promising(_DRAWN)}
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
