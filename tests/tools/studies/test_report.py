"""Reports: the files are there, hold the data, and stand by themselves."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from helpers.studies import declared, stories_loader
from selfspec.errors import StorageError
from selfspec.tools.studies.judge import measure
from selfspec.tools.studies.models import texts_of
from selfspec.tools.studies.report import pictures as drawing
from selfspec.tools.studies.report.files import write_data
from selfspec.tools.studies.report.page import finding_of, printable, write_page
from selfspec.tools.studies.report.panels import Panel, panels
from selfspec.tools.studies.report.pictures import draw_all, row_agrees
from selfspec.tools.studies.run import Finding, work_on
from selfspec.tools.studies.table import pareto_front

pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def finding(tmp_path_factory: pytest.TempPathFactory) -> Finding:
    """A study with two drafts confirmed, greedily and sampled under two rules."""
    study = declared(drafts=["exits", "sublayers", "layers"], confirm=1, accept=["token", "block"])
    return work_on(study, stories_loader(), tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def shown(finding: Finding) -> list[Panel]:
    return panels(finding)


@pytest.mark.tools
def test_confirmed_points_agree_with_their_estimates(finding: Finding) -> None:
    rows = [row for row in finding.table if row.get("measured_acceptance_rate") is not None]
    assert {(row["temperature"], row["rule"]) for row in rows} == {(0.0, "token"), (1.0, "token"), (1.0, "block")}
    for row in rows:
        if row["temperature"] == 0:
            # Greedily the estimate is the generation itself.
            assert row["exact"] is True
            assert row["measured_acceptance_rate"] == pytest.approx(row["acceptance_rate"])
            assert row["measured_mean_accepted_length"] == pytest.approx(row["mean_accepted_length"])
        elif row["rule"] == "token":
            assert row_agrees(row)
            assert row["exact"] is None
        else:
            assert "acceptance_rate" not in row
        assert row["measured_speedup"] > 0
        assert row["measured_cache_bytes"] > 0


@pytest.mark.tools
def test_a_draft_that_changed_the_text_would_show(finding: Finding) -> None:
    result = next(each for each in finding.results.values() if each.point.kind == "measure" and each.found["exact"])
    studied = stories_loader()("")
    given = texts_of(finding.results[result.point.content["texts"]], studied.model.device)
    given.ids[0, -1] += 1
    assert measure(studied, given, result.point)["exact"] is False


def test_data_is_the_same_in_every_form(finding: Finding, tmp_path: Path) -> None:
    from pyarrow import parquet

    write_data(finding, tmp_path)
    table = finding.table
    lines = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    assert lines == json.loads(json.dumps(table))
    with (tmp_path / "points.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["draft"] for row in rows] == [row["draft"] for row in table]
    assert [float(row["alpha"]) for row in rows if row["alpha"]] == pytest.approx(
        [row["alpha"] for row in table if "alpha" in row], rel=1e-5
    )
    data = parquet.read_table(tmp_path / "points.parquet")
    assert data.column("alpha").to_pylist() == [row.get("alpha") for row in table]
    about = json.loads(data.schema.metadata[b"selfspec"])
    assert about == json.loads((tmp_path / "study.json").read_text())
    assert about["study"]["seeds"] == [0]
    assert about["environments"][0]["torch"]


@pytest.fixture(autouse=True, scope="module")
def coarse() -> Iterator[None]:
    """Pictures of few dots, which are drawn sooner."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(drawing, "_DPI", 60)
        yield


@pytest.fixture(scope="module")
def pictures(shown: list[Panel], coarse: None, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return draw_all(shown, tmp_path_factory.mktemp("pictures"))


def test_every_picture_is_drawn(pictures: list[Path]) -> None:
    from PIL import Image

    names = {"importance", "acceptance_by_position", "exits", "pareto", "agreement"}
    assert {file.stem for file in pictures} == names
    for file in pictures:
        with Image.open(file) as image:
            # At 200 dots per inch more than three times as many.
            assert image.width > 300
            assert len(image.convert("RGB").getcolors(2**24) or []) > 10


def test_notes_of_a_single_panel_are_inside_the_picture(
    shown: list[Panel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[tuple[float, float, float]] = []

    def keep(figure: Figure, file: Path, **_: object) -> None:
        file.touch()
        figure.draw_without_rendering()
        box = figure.texts[0].get_window_extent()
        notes.append((box.x0, box.x1, figure.bbox.x1))

    monkeypatch.setattr(Figure, "savefig", keep)
    draw_all(shown[:1], tmp_path)
    assert len(notes) >= 4
    assert all(left >= 0 and right <= width for left, right, width in notes)


def test_drafts_from_a_reduced_vocabulary_have_rows_and_prices_of_their_own(tmp_path: Path) -> None:
    words = tmp_path / "words.json"
    words.write_text(json.dumps({"tokens": list(range(64))}))
    drafts = [f"{path}{end}" for path in ("exit:2", "exit:3", "skip:attn=1") for end in ("", f"+vocab:{words}")]
    finding = work_on(declared(drafts=drafts, temperatures=[0.0]), stories_loader(), tmp_path)
    assert not finding.failed
    c = {row["draft"]: row["c"] for row in finding.table}
    # Its steps read fewer rows of the head.
    assert all(c[whole] > c[reduced] for whole, reduced in zip(drafts[::2], drafts[1::2], strict=True))
    assert {row["kind"] for row in finding.table} == {"exit", "skip", "exit+vocab", "skip+vocab"}
    shown = panels(finding)
    assert {row["draft"] for row in shown[0].exits} == {"exit:2", "exit:3"}
    assert len(draw_all(shown, tmp_path)) == 4


def test_the_page_needs_nothing_else(
    finding: Finding, shown: list[Panel], pictures: list[Path], tmp_path: Path
) -> None:
    page = write_page(finding, shown, pictures, tmp_path / "report.html").read_text()
    assert '<script src="http' not in page
    assert page.count("<img alt=") == len(pictures)
    assert "Plotly.newPlot" in page
    assert "stories, given, temperature 1" in page
    assert "exit:4" in page
    # A title, a sentence for each panel, and the whole table.
    assert "<h1>Study of drafts: stories</h1>" in page
    assert all(finding_of(panel) in unescape(page) for panel in shown)
    assert all(page.count(f"<td>{row['draft']}</td>") == len(shown) for row in shown[0].best)


def test_a_sentence_never_praises_what_loses(shown: list[Panel]) -> None:
    def promising(speed: float) -> str:
        rows = [{**row, "predicted_speedup": speed} if row.get("best_length") else row for row in shown[0].rows]
        return finding_of(replace(shown[0], rows=rows))

    assert "promises most, 1.25 times the speed of plain decoding" in promising(1.25)
    assert "no draft promises to beat plain decoding" in promising(0.9)


def test_names_are_shown_and_not_obeyed(finding: Finding, shown: list[Panel], tmp_path: Path) -> None:
    name = "skip-file:<b>x</b> $a^$ </script>"
    panel = shown[0]
    best = panel.best[0]["draft"]
    rows = [{**row, "draft": name, "kind": "skip-file"} if row["draft"] == best else row for row in panel.rows]
    right = {name if draft == best else draft: marks for draft, marks in panel.right.items()}
    odd = replace(panel, title="<i>m</i>, $t^$", rows=rows, right=right)
    page = write_page(finding, [odd], [], tmp_path / "report.html").read_text()
    assert "<h2>&lt;i&gt;m&lt;/i&gt;" in page
    assert "<b>x" not in page
    # In pictures, too, where plotly would take tags for its own.
    assert "\\u003cb\\u003ex" not in page
    assert page.count("&lt;b&gt;x") > 2
    assert {file.stem for file in draw_all([odd], tmp_path)} >= {"acceptance_by_position", "pareto"}


def test_panels_show_what_the_table_holds(shown: list[Panel]) -> None:
    greedy, sampled = shown
    assert (greedy.title, sampled.title) == ("stories, given, greedy", "stories, given, temperature 1")
    assert {name: len(layers) for name, layers in greedy.importance.items()} == {"attention": 5, "MLP": 5, "both": 5}
    assert len(greedy.exits) == 4 * 2
    front = pareto_front(greedy.best)
    assert [row["c"] for row in front] == sorted(row["c"] for row in front)
    assert len(greedy.promising(3)) == 3
    # The better draft alone is right where the two together are.
    drafts = [row["draft"] for row in greedy.promising(2)]
    chosen = greedy.cheapest_right(drafts, 0)
    for at, which in enumerate(chosen):
        right = [greedy.right[draft][0][at] == "1" for draft in drafts]
        assert which == (right.index(True) if any(right) else -1)
    assert "".join(greedy.tokens[0]).strip()


def test_letters_that_cannot_be_seen_are_made_visible() -> None:
    assert printable("a b\n") == "a b↵"
    assert printable("\t\x00é") == "    ·é"


def test_a_report_that_cannot_be_written_is_said(finding: Finding, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        write_data(finding, tmp_path / "file")
