"""Reports of studies: the files are there, hold the data, and stand by themselves."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from helpers.studies import declared, stories_loader
from selfspec.errors import StorageError
from selfspec.measure.estimate import Estimate
from selfspec.tools.lab import report
from selfspec.tools.lab.ablation import Finding, work_on
from selfspec.tools.lab.estimates import confirm
from selfspec.tools.lab.report import BLACK, GREY, Mark, mark_of, marks_of, write_data
from selfspec.tools.lab.runs import Runs
from selfspec.tools.lab.study import texts_of
from selfspec.tools.lab.study_report import TextFindings, draw, findings, page, printable, row_agrees, write_report
from selfspec.tools.lab.table import pareto_front

pytest.importorskip("pandas")


@pytest.fixture(scope="module")
def finding() -> Finding:
    """A study with one draft confirmed on each text, greedily and sampled."""
    return work_on(declared(drafts=["exits", "sublayers", "layers"], confirm=1), stories_loader(), Runs(None))


@pytest.fixture(scope="module")
def shown(finding: Finding) -> list[TextFindings]:
    return findings(finding)


@pytest.fixture(autouse=True, scope="module")
def coarse() -> Iterator[None]:
    """Pictures of few dots, which are drawn sooner."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(report, "_DPI", 50)
        yield


@pytest.mark.tools
def test_confirmed_drafts_agree_with_their_estimates(finding: Finding) -> None:
    rows = [row for row in finding.table if row.get("measured_acceptance_rate") is not None]
    assert {row["temperature"] for row in rows} == {0.0, 1.0}
    for row in rows:
        if row["temperature"] == 0:
            # Greedily the estimate is the generation itself.
            assert row["exact"] is True
            assert row["measured_acceptance_rate"] == pytest.approx(row["acceptance_rate"])
            assert row["measured_mean_accepted_length"] == pytest.approx(row["mean_accepted_length"])
        else:
            assert row_agrees(row)
            assert row["exact"] is None
        assert row["measured_speedup_low"] <= row["measured_speedup"] <= row["measured_speedup_high"]
        assert row["measured_cache_bytes"] > 0
        assert len(row["measured_accepted_by_text"]) == len(row["first_judged_by_text"]) == 3


@pytest.mark.tools
def test_a_draft_that_changed_the_text_would_show(finding: Finding) -> None:
    run = next(each for each in finding.runs if each.asked.kind == "confirm" and each.found["exact"])
    studied = stories_loader()("")
    written = next(each for each in finding.runs if each.asked.key == run.asked.under["texts"])
    texts = texts_of(written, studied.model.device)
    texts[0].ids[0, -1] += 1
    assert confirm(studied, texts, 0.0, 16, run.asked)["exact"] is False


@pytest.mark.tools
def test_a_study_is_written_whole(finding: Finding, shown: list[TextFindings], tmp_path: Path) -> None:
    from PIL import Image
    from pyarrow import parquet

    files = {file.name for file in write_report(finding, tmp_path)}
    pictures = {"importance", "acceptance_by_position", "exits", "pareto", "agreement"}
    assert files == {"points.csv", "points.parquet", "report.md", "report.html", *(f"{each}.png" for each in pictures)}
    for name in pictures:
        with Image.open(tmp_path / f"{name}.png") as image:
            assert len(image.convert("RGB").getcolors(2**24) or []) > 10
        assert (tmp_path / f"{name}.svg").read_text().lstrip().startswith("<?xml")
    table = finding.table
    with (tmp_path / "points.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["draft"] for row in rows] == [row["draft"] for row in table]
    data = parquet.read_table(tmp_path / "points.parquet")
    assert data.column("alpha").to_pylist() == [row["alpha"] for row in table]
    about = json.loads(data.schema.metadata[b"selfspec"])
    assert about["study"]["seed"] == 0
    assert about["environments"][0]["torch"]
    # The page needs nothing else, and shows no raw values of the program.
    html = (tmp_path / "report.html").read_text()
    assert len(html) < 1_000_000
    assert "<script" not in html
    assert html.count("<img alt=") == len(pictures)
    assert "{'" not in unescape(html)
    assert '{"' not in unescape(html)
    assert "<h1>Study of drafts: stories</h1>" in html
    assert all(each.sentence() in unescape(html) for each in shown)
    assert all(html.count(f"<td>{row['draft']}</td>") == len(shown) for row in shown[0].best)
    assert "![pareto](pareto.png)" in (tmp_path / "report.md").read_text()


def test_notes_are_inside_the_pictures(
    shown: list[TextFindings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[tuple[float, float]] = []

    def keep(figure: Figure, file: Path, **_: object) -> None:
        file.touch()
        figure.draw_without_rendering()
        box = figure.texts[0].get_window_extent()
        notes.append((box.x0, figure.bbox.x1 - box.x1))

    monkeypatch.setattr(Figure, "savefig", keep)
    draw(shown[:1], tmp_path)
    assert len(notes) >= 4
    assert min(min(each) for each in notes) >= 0


def frames(shown: list[TextFindings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many frames and circles mark a best draft."""
    marked: list[int] = []

    def keep(figure: Figure, file: Path, **_: object) -> None:
        file.touch()
        rings = [
            each
            for axes in figure.axes
            for each in axes.collections
            if isinstance(each, PathCollection) and each.get_sizes().tolist() == [60]
        ]
        marked.append(len(rings) + sum(len(axes.patches) for axes in figure.axes))

    with monkeypatch.context() as patched:
        patched.setattr(Figure, "savefig", keep)
        draw(shown, tmp_path)
    return sum(marked)


@pytest.mark.tools
def test_no_draft_is_marked_best_where_none_gains(
    shown: list[TextFindings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def promising(most: float) -> list[TextFindings]:
        top = shown[0].best[0]["predicted_speedup"]
        rows = [{**row, "predicted_speedup": row["predicted_speedup"] / top * most} for row in shown[0].rows]
        return [replace(shown[0], rows=rows)]

    assert frames(promising(1.25), tmp_path, monkeypatch) > 0
    assert frames(promising(0.9), tmp_path, monkeypatch) == 0


def test_a_heat_map_of_many_layers_has_ticks_and_no_numbers(tmp_path: Path) -> None:
    import numpy as np
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    report.heat(axes, np.full((2, 80), 0.5), ["a", "b"], [str(layer) for layer in range(80)], ".2f")
    assert len(axes.texts) == 0
    assert [each.get_text() for each in axes.get_xticklabels()] == [str(layer) for layer in range(0, 80, 5)]


@pytest.mark.parametrize("layers", [4, 30, 80])
def test_lines_by_layer_are_legible_at_any_depth(layers: int) -> None:
    marks = {"attention": Mark("#000000", "o"), "MLP": Mark("#D55E00", "s")}
    lines = {name: {layer: Estimate(0.5, 0.4, 0.6) for layer in range(layers)} for name in marks}
    figure = Figure((7.2, 2.5))
    axes = figure.subplots()
    report.by_layer(axes, lines, marks, "acceptance", 1.0)
    figure.draw_without_rendering()
    boxes = [each.get_window_extent() for each in axes.get_xticklabels()]
    assert len(boxes) >= min(layers, 6)
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_drafts_from_a_reduced_vocabulary_have_rows_and_prices_of_their_own(tmp_path: Path) -> None:
    words = tmp_path / "words.json"
    words.write_text(json.dumps({"tokens": list(range(64))}))
    drafts = [f"{path}{end}" for path in ("exit:2", "exit:3", "skip:attn=1") for end in ("", f"+vocab:{words}")]
    finding = work_on(declared(drafts=drafts, temperatures=[0.0]), stories_loader(), Runs(None))
    assert not finding.failed
    c = {row["draft"]: row["c"] for row in finding.table}
    assert all(c[f"{path}+vocab:{words}"] < c[path] for path in ("exit:2", "exit:3", "skip:attn=1"))
    assert {row["kind"] for row in finding.table} == {"exit", "exit+vocab", "skip", "skip+vocab"}


def test_names_are_shown_and_not_obeyed(finding: Finding, shown: list[TextFindings], tmp_path: Path) -> None:
    name = "skip-file:<b>x</b> $a^$ </script>"
    first = shown[0]
    best = first.best[0]["draft"]
    rows = [{**row, "draft": name, "kind": "skip-file"} if row["draft"] == best else row for row in first.rows]
    right = {name if draft == best else draft: marks for draft, marks in first.right.items()}
    odd = replace(first, title="<i>m</i>, $t^$", rows=rows, right=right)
    html = page(finding, [odd], draw([odd], tmp_path)).html
    assert "<h2>&lt;i&gt;m&lt;/i&gt;" in html
    assert "<b>x" not in html
    assert html.count("&lt;b&gt;x") > 2


def test_findings_show_what_the_table_holds(shown: list[TextFindings]) -> None:
    greedy, sampled = shown
    assert (greedy.title, sampled.title) == ("stories, given, greedy", "stories, given, temperature 1")
    assert {name: len(layers) for name, layers in greedy.importance.items()} == {"attention": 5, "MLP": 5, "both": 5}
    assert {length: len(layers) for length, layers in greedy.exits.items()} == {1: 4, 2: 4}
    front = pareto_front(greedy.best)
    assert [row["c"] for row in front] == sorted(row["c"] for row in front)
    assert len(greedy.promising(3)) == 3
    # The better draft alone is right where the two together are.
    drafts = [row["draft"] for row in greedy.promising(2)]
    for at, which in enumerate(greedy.cheapest_right(drafts, 0)):
        right = [greedy.right[draft][0][at] == "1" for draft in drafts]
        assert which == (right.index(True) if any(right) else -1)
    assert "".join(greedy.tokens[0]).strip()


def test_letters_that_cannot_be_seen_are_made_visible() -> None:
    assert printable("a b\n") == "a b↵"
    assert printable("\t\x00é") == "    ·é"


def test_a_report_that_cannot_be_written_is_said(finding: Finding, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        write_data(finding.table, {}, tmp_path / "file", "points")


def test_a_kind_has_its_colour_in_every_picture_and_a_cascade_is_hollow() -> None:
    assert mark_of(None).colour == BLACK
    assert mark_of("exit:2").colour == mark_of("exit:4+vocab:words.json").colour == mark_of("exit").colour
    assert mark_of("int8+int4").colour == mark_of("lookup+int8").colour
    assert mark_of("exit:2").colour != mark_of("int8").colour
    assert mark_of("something else").colour == GREY
    assert mark_of("exit:4").filled
    assert not mark_of("lookup+exit:4").filled


def test_drafts_of_one_kind_are_told_apart() -> None:
    marks = marks_of(["exit:2", "exit:3", "skip:attn=1", "exit:4"])
    looks = {(mark.colour, mark.dashes, mark.marker) for mark in marks.values()}
    assert len(looks) == 4
    assert marks["exit:2"] == mark_of("exit:2")
    assert len({mark.dashes for mark in marks_of([f"exit:{layer}" for layer in range(1, 7)]).values()}) == 6
