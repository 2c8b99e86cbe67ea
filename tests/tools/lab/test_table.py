"""The table of texts, worked out by hand; its pictures and its report."""

from __future__ import annotations

import json
import math
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markdown_it import MarkdownIt

from helpers.studies import text_row
from selfspec.control.costs import Costs
from selfspec.errors import StudyError
from selfspec.measure.estimate import Estimate
from selfspec.tools.lab.plot import COLUMN, plot, read_table
from selfspec.tools.lab.prices import RoundCosts
from selfspec.tools.lab.report import draw, page_of, provenances, write_report
from selfspec.tools.lab.runs import FILE, Row, Run, Runs
from selfspec.tools.lab.table import doubts, p_value, positions, records, shown, summarise

pandas = pytest.importorskip("pandas")

SLOW = (2.1, 3.1, 2.1)


def rows_of(draft: str = "exit:2", **columns: Any) -> list[Row]:
    """Three texts by `model.generate` and plain decoding, and by a draft that takes half the time."""
    calls = range(3)
    stock = [text_row(name, call, seconds=SLOW[call]) for name in ("generate", "plain") for call in calls]
    own = [text_row("draft", call, draft, seconds=(SLOW[call] + 0.1) / 2, rounds=8, **columns) for call in calls]
    return stock + own


def line(rows: list[Row], arm: str) -> Row:
    return next(row for row in records(summarise(rows)) if row["arm"] == arm)


def test_a_line_sums_up_texts() -> None:
    found = line(rows_of(), "exit:2")
    assert (found["n"], found["rounds"], found["new_tokens"], found["kind"], found["exit"]) == (3, 24, 48, "exit", 2)
    assert found["mean_accepted_length"] == 2.0
    assert found["acceptance_rate"] == pytest.approx(10 / 14)
    assert found["alpha"] == pytest.approx(6 / 8)
    assert found["acceptance_rate_low"] < 10 / 14 < found["acceptance_rate_high"]
    assert (found["judged_by_position"], found["accepted_by_position"]) == ([24.0, 18.0], [18.0, 12.0])
    assert (found["drafted_per_round"], found["steps_per_round"], found["drafting_share"]) == (2, 2, 1)
    # Prefill aside: 2, 3 and 2 seconds beside half of that.
    assert found["speedup"] == found["speedup_over_generate"] == pytest.approx(2.0)
    assert found["tokens_per_second"] == pytest.approx(45 / 3.5)
    assert "speedup" not in found or found["speedup_low"] <= 2.0 <= found["speedup_high"]
    plain = line(rows_of(), "plain")
    assert (plain["speedup"], plain["mean_accepted_length"]) == (1.0, 1.0)
    assert "acceptance_rate" not in plain


def test_repeats_are_no_further_texts() -> None:
    rows = rows_of()
    twice = rows + [{**row, "repeat": 1} for row in rows]
    assert line(twice, "exit:2") == line(rows, "exit:2")
    # Of a single text the repeats say how sure a speed is.
    one = [
        {**row, "repeat": repeat, "seconds": row["seconds"] + repeat / 10} for row in rows[::3] for repeat in range(6)
    ]
    assert line(one, "exit:2")["speedup_low"] < line(one, "exit:2")["speedup"]
    assert "acceptance_rate_low" not in line(one, "exit:2")


def test_an_arm_that_dropped_out_is_compared_in_the_turns_that_it_took() -> None:
    rows = [text_row("plain", call, repeat=turn, seconds=2.1 + 2 * turn) for call in range(2) for turn in range(3)]
    rows += [text_row("draft", call, "exit:2", seconds=1.1) for call in range(2)]
    assert line(rows, "exit:2")["speedup"] == pytest.approx(2.0)


@pytest.mark.parametrize("texts", [1, 3])
def test_a_report_states_one_speed_of_one_thing(texts: int, tmp_path: Path) -> None:
    """Where a hiccup falls into a turn, speeds and their ratios still say the same, in the table and on the page."""
    hiccup = {("draft", 0, 1): 7.0, ("plain", 0, 2): 3.0, ("generate", texts - 1, 0): 5.0}
    usual = {"generate": 4.1, "plain": 2.1, "draft": 1.1}
    rows = [
        text_row(
            name,
            call,
            "exit:2" if name == "draft" else None,
            repeat,
            seconds=hiccup.get((name, call, repeat), seconds + call * repeat / 8),
        )
        for name, seconds in usual.items()
        for call in range(texts)
        for repeat in range(3)
    ]
    table = summarise(rows)
    plain, own = (line(rows, name) for name in ("plain", "exit:2"))
    for name, other in (("speedup", "plain"), ("speedup_over_generate", "generate")):
        rate = line(rows, other)["tokens_per_second"]
        assert own[name] == pytest.approx(own["tokens_per_second"] / rate)
        assert own[f"{name}_low"] <= own[name] <= own[f"{name}_high"]
    assert plain["speedup"] == 1
    # And each of them once.
    write_report("Benchmark", rows, {}, tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert len(table) == len(re.findall(r"^\| (?:generate|plain|exit:2) \|", page, re.MULTILINE))
    (said,) = re.findall(r"^\| exit:2 \|.*", page, re.MULTILINE)
    assert all(said.count(shown(own, name)) == 1 for name in ("speedup_over_generate", "tokens_per_second"))


def test_a_rate_of_acceptance_is_neither_that_of_first_tokens_nor_rounded_to_one() -> None:
    counts: dict[str, Any] = {"judged": [100, 100, 100, 90], "accepted": [100, 100, 90, 90]}
    rows = [text_row("draft", call, "int8", draft_length=4, shapes=[[4, 4, 100]], **counts) for call in range(3)]
    found = line(rows, "int8")
    assert (found["acceptance_rate"], found["alpha"]) == (pytest.approx(380 / 390), 1.0)
    (page,) = page_of([found])
    head, _, said = (dict(enumerate(each.split(" | "))) for each in page.splitlines())
    named = {name.strip("| "): said[place].strip("| ") for place, name in head.items()}
    assert named["acceptance rate"].startswith("0.974 (")
    assert named["alpha"].startswith("1.000 (")
    assert shown({"acceptance_rate": 0.998}, "acceptance_rate") == "0.998"


def test_a_batch_is_a_call_of_several_texts() -> None:
    rows = [text_row("plain", 0, row=row, rounds=32, batch=2) for row in range(2)]
    found = line(rows, "plain")
    assert (found["n"], found["new_tokens"], found["mean_accepted_length"]) == (1, 32, 1.0)


def test_models_of_one_name_and_their_drafts_stay_apart() -> None:
    other = [{**row, "weights": "2" * 20, "setting": "z"} for row in rows_of("exit:3")]
    found = summarise(rows_of() + other)
    assert set(found["model"]) == {"tiny 11111111", "tiny 22222222"}
    assert len(found) == 6
    assert len(summarise(rows_of() + [{**row, "weights": "2" * 20} for row in rows_of()])) == 6


def test_what_is_promised_is_tokens_by_cost_of_a_round() -> None:
    costs = RoundCosts(Estimate(0.2, 0.1, 0.3, 0.9), Costs(0.2, 1.0, 0.1, 0.05), Costs(0.0, 1.0, 0.1, 0.05))
    assert costs.of_round(2, 2).value == pytest.approx(0.4 + 1.2 + 0.05)
    assert costs.of_round(0, 2).value == pytest.approx(1.25)
    found = line([costs.priced(row) if row["draft"] else row for row in rows_of()], "exit:2")
    assert found["predicted_speedup"] == pytest.approx(2 / 1.65)
    assert (found["predicted_speedup_low"], found["predicted_speedup_high"]) == pytest.approx((2 / 1.85, 2 / 1.45))
    assert (found["c"], found["c_low"], found["o"]) == (0.2, 0.1, 0.05)
    assert found["best_length"] is True


def test_texts_have_a_worth_beside_those_of_plain_decoding() -> None:
    nats = [0.2, 0.5, 0.3]
    rows = [text_row("plain", call, nats=16 * each) for call, each in enumerate(nats)]
    rows += [text_row("draft", call, "exit:2", nats=16 * (each + 0.1)) for call, each in enumerate(nats)]
    found = line(rows, "exit:2")
    assert found["perplexity"] == pytest.approx(math.exp(sum(nats) / 3 + 0.1))
    # In pairs there is no spread, however far apart texts are.
    assert [found[f"perplexity_ratio{end}"] for end in ("", "_low", "_high")] == pytest.approx([math.exp(0.1)] * 3)
    assert found["perplexity_p"] == pytest.approx(2 / 2**3)
    assert not found["quality_differs"]


def test_many_comparisons_do_not_make_a_difference() -> None:
    """Each of six arms is off by chance, one alone beyond 5 %; together none is."""
    draws = random.Random(3)
    rows = [text_row("plain", call, nats=8.0) for call in range(12)]
    for arm in range(6):
        nats = [16 * (0.5 + draws.gauss(0, 0.1)) for _ in range(12)]
        rows += [text_row("draft", call, f"exit:{arm + 1}", nats=each) for call, each in enumerate(nats)]
    off = [text_row("draft", call, "lookup", nats=24.0) for call in range(12)]
    table = summarise(rows + off)
    assert (table["perplexity_p"].dropna() < 0.05).sum() == 2
    (said,) = [each for each in doubts(table) if "by more than chance" in each]
    assert said.endswith(": lookup")


def test_signs_are_tested_and_not_only_their_spread() -> None:
    assert p_value([1.0, -1.0, 2.0, -2.0]) == 1.0
    assert p_value([1.0] * 20) < 0.001
    generator = random.Random(0)
    chance = [p_value([generator.gauss(0, 1) for _ in range(8)]) for _ in range(200)]
    assert sum(each <= 0.05 for each in chance) <= 20


def test_figures_that_say_less_than_they_seem_to_are_said() -> None:
    (few,) = doubts(summarise(rows_of()))
    assert few == "tiny, w, greedy: 3 texts; give at least 10, since intervals over fewer say little"
    many = [text_row(name, call, draft) for call in range(12) for name, draft in (("plain", None), ("draft", "exit:2"))]

    def said(**columns: Any) -> str:
        return "\n".join(doubts(summarise([{**row, **(columns if row["draft"] else {})} for row in many])))

    assert said(rounds=8) == ""
    fast = said(seconds=0.3)
    assert "exit:2: 5.00 times plain decoding with 1.00 times its tokens a pass cannot be" in fast
    assert "hardly a round had a draft" in said(shapes=[[0, 0, 16]], judged=[], accepted=[])
    assert "texts repeat themselves" in said(repeated_share=0.5)
    assert "of 2 cores 0.2 were free for 1 thread," in said(free=0.2)
    # Where nothing was timed, busy cores are no doubt.
    untimed = [{name: row[name] for name in row if "second" not in name} for row in many]
    assert doubts(summarise([{**row, "free": 0.2} for row in untimed])) == []
    assert "1 text, so there are no intervals" in doubts(summarise(many[:2]))[0]


def test_refused_and_absent_arms_have_a_line_without_figures() -> None:
    rows = [*rows_of(), text_row("static", absence="no compiler")]
    absent = line(rows, "static")
    assert absent["absence"] == "no compiler"
    assert "n" not in absent
    assert line(rows_of(refused=True), "exit:2")["refused"] is True


def study(layers: int = 12) -> list[Row]:
    """Judged exits and skipped parts at two lengths under two conditions, with costs."""
    costs = RoundCosts(Estimate(0.2, 0.1, 0.3, 0.9), Costs(0.2, 1.0, 0.1, 0.05), Costs(0.0, 1.0, 0.1, 0.05))
    drafts = [f"{kind}{layer}" for layer in range(1, layers) for kind in ("exit:", "skip:attn=", "skip:mlp=")]
    rows = [
        text_row("draft", call, draft, draft_length=length, temperature=temperature, judged=[20] * length,
                 accepted=[18 - call] * length, shapes=[[length, length, 8]], rounds=8, measured="teacher forcing")
        for draft in drafts for length in (1, 4) for temperature in (0.0, 0.8) for call in range(3)
    ]  # fmt: skip
    return [
        costs.priced({name: row[name] for name in row if "seconds" not in name and name != "decoder"}) for row in rows
    ]


def test_pictures_fit_a_column_and_say_what_they_show(tmp_path: Path) -> None:
    from matplotlib.text import Text

    table = summarise(study())
    pictures: list[dict[str, Any]] = [
        {"x": "layer", "y": "alpha", "by": "part", "panel": "temperature"},
        {"x": "exit", "y": "predicted_speedup", "by": "draft_length"},
        {"x": "c", "y": "alpha", "by": "kind"},
        {"x": "acceptance_rate", "y": "draft"},
        {"x": "position", "y": "accepted", "by": "draft_length"},
        {"x": "draft_length", "y": "exit", "colour": "alpha"},
        {"x": "draft_length", "y": "exit", "colour": "predicted_speedup", "panel": "temperature"},
    ]
    for how in pictures:
        figure = plot(table, to=tmp_path / "a.pdf", **how)
        figure.draw_without_rendering()
        assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
        assert figure.get_size_inches()[0] == COLUMN
        axes = [each for each in figure.axes if each.get_label() != "<colorbar>"]
        assert axes[-1].get_xlabel()
        assert all(each.get_ylabel() or how["y"] == "draft" for each in axes)
        if by := how.get("by"):
            (legend,) = figure.legends
            # One legend with every key once.
            drawn = positions(table) if how["x"] == "position" else table
            keys = [each.get_text() for each in legend.get_texts()]
            assert sorted(keys) == sorted({str(each) for each in drawn.dropna(subset=[how["x"], by])[by]})
            box = legend.get_window_extent()
            assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1 + 1
    # Titles of panels are as wide as there is room, however long.
    others: list[dict[str, Any]] = [{"y": "arm"}, {"y": "alpha"}, {"y": "arm", "colour": "alpha"}]
    for how in others:
        long = table.assign(
            conditions="a-model-of-a-long-name, summaries, temperature 0.8, 64 tokens of prompt, as chat"
        )
        figure = plot(long, x="draft_length", panel="conditions", **how)
        figure.draw_without_rendering()
        (title,) = [each for each in figure.findobj(Text) if each.get_text().startswith("a-model")]
        box = title.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
        assert " ".join(title.get_text().split()) == long["conditions"].iloc[0]
    with pytest.raises(StudyError, match="no column 'zzz'"):
        plot(table, "zzz", "alpha")
    with pytest.raises(StudyError, match="no line with speed"):
        plot(table.assign(speed=float("nan")), "speed", "alpha")


@pytest.mark.parametrize("y", ["arm", "alpha"])
def test_panels_show_all_their_points(y: str) -> None:
    table = pandas.DataFrame(
        {"text": ["slow", "slow", "fast", "fast"], "speedup": [1.0, 2.0, 1.5, 9.0], "alpha": 0.5, "arm": [*"abab"]}
    )
    table["speedup_low"], table["speedup_high"] = table["speedup"] - 0.1, table["speedup"] + 0.1
    for axes in plot(table, "speedup", y, panel="text").axes:
        assert axes.get_xlim()[0] == 0
        assert axes.get_xlim()[1] > 9.1


def test_a_heat_map_has_numbers_in_order_and_labels_apart() -> None:
    names = [f"texts/{kind}" for kind in ("chat", "code", "summary")]
    layers = sorted(range(30), key=str)
    table = pandas.DataFrame(
        [{"layer": layer, "workload": name, "alpha": layer / 30} for name in names for layer in layers]
    )
    for x, y in (("layer", "workload"), ("workload", "layer")):
        figure = plot(table, x, y, colour="alpha")
        figure.draw_without_rendering()
        axes, bar = figure.axes
        (image,) = axes.images
        shown = image.get_array()
        assert shown is not None
        along = 1 if x == "layer" else 0
        assert (np.diff(shown, axis=along) > 0).all()
        boxes = [each.get_window_extent() for each in axes.get_xticklabels()]
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
        label = bar.yaxis.label.get_window_extent()
        assert 0 <= label.y0 <= label.y1 <= figure.bbox.y1
        assert label.x1 <= figure.bbox.x1


def test_a_legend_of_long_names_is_whole() -> None:
    table = pandas.DataFrame(
        {"x": [1, 2, 3], "y": [1, 2, 3], "rule": [f"a-rule-of-a-long-name:top_k={k}" for k in "abc"]}
    )
    figure = plot(table, "x", "y", "rule")
    figure.draw_without_rendering()
    assert [each.get_text() for each in figure.legends[0].get_texts()] == table["rule"].tolist()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1
    (axes,) = figure.axes
    assert axes.get_window_extent().y1 <= box.y0


def test_names_that_are_alike_at_both_ends_have_a_key_each() -> None:
    names = [f"{'a' * 40}{middle}{'z' * 40}" for middle in "12"]
    (legend,) = plot(pandas.DataFrame({"x": [1, 2], "y": [1, 2], "rule": names}), "x", "y", "rule").legends
    assert [each.get_text() for each in legend.get_texts()] == names


def test_what_is_of_several_conditions_is_neither_averaged_nor_joined() -> None:
    table = summarise(study(4))
    table["alpha"] += table["temperature"] / 10
    with pytest.raises(StudyError, match="they differ in temperature; choose by --only"):
        plot(table, "draft_length", "exit", colour="alpha")
    greedy = table[table["temperature"] == 0]
    for lines, joined in ((table, ""), (greedy[greedy["draft_length"] == 1], "-")):
        (axes,) = plot(lines, "exit", "alpha").axes
        assert {str(each.get_linestyle()) for each in axes.lines} <= {joined or "None"}


def test_positions_with_hardly_a_trial_are_not_drawn() -> None:
    rare = [text_row("draft", call, "exit:2", judged=[20, 3], accepted=[10, 3]) for call in range(3)]
    assert positions(summarise(rare))["position"].tolist() == [1]
    assert positions(summarise(rows_of())).empty is False


def test_a_report_is_written_whole_and_shows_names_as_they_are(tmp_path: Path) -> None:
    from pyarrow import parquet

    name = "a|b # <b>$x^$ [c](d) *e* `f` _g_ ~h~ &amp; \\"
    usual, odd = (tmp_path / each for each in ("usual", "odd"))
    files = write_report("Study", study(6), {"seed": 0}, usual)
    assert {file.name for file in files} >= {"report.md", "table.csv", "table.parquet"}
    assert {file.stem for file in usual.glob("*.pdf")} == {"tokens", "importance", "exits", "cost", "positions"}
    about = json.loads(parquet.read_table(usual / "table.parquet").schema.metadata[b"selfspec"])
    assert about["declared"] == {"seed": 0}
    assert about["provenance"][0].items() >= {"weights": "1" * 20, "selfspec": "0", "prompts": "p"}.items()
    assert len(read_table(usual / "table.parquet")) == len(read_table(usual / "table.csv")) == 15 * 4
    write_report(name, [{**row, "model": name, "arm": name} for row in study(6)], {}, odd)
    for page in (usual, odd):
        tokens = MarkdownIt().enable("table").parse((page / "report.md").read_text())
        kinds = {child.type for token in tokens for child in token.children or []}
        assert kinds <= {"text", "text_special", "softbreak", "image"}


def test_what_was_measured_alike_is_told_once_with_all_its_prompts() -> None:
    rows = [{**row, "prompts": prompts} for prompts in ("chat", "code") for row in study(2)]
    (told,) = provenances([*rows, *rows])
    assert told["prompts"] == "chat, code"


def test_every_column_is_defined() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "columns.md").read_text()
    rows = [*rows_of(nats=1.0, refused=False, equal=True, agreed=8.0), *study(3)]
    for name in {*summarise(rows), *(name for row in rows for name in row)}:
        figure = re.sub("_(low|high)$", "", str(name))
        assert f"`{figure}`" in page, name


def test_a_folder_of_runs_is_a_table(tmp_path: Path) -> None:
    figures = {name: value for name, value in text_row("draft", 0, "exit:2").items() if name not in ("run", "measured")}
    Runs(tmp_path).keep(Run("generation", {}).rows([figures], {}))
    for place in (tmp_path, tmp_path / FILE):
        assert read_table(place)["draft"].tolist() == ["exit:2"]
    with pytest.raises(StudyError, match="is no table"):
        read_table(tmp_path / "x.txt")
    # What rounds cost is in a report alone.
    write_report("Study", study(3), {}, tmp_path)
    assert read_table(tmp_path)["predicted_speedup"].notna().all()
    assert draw(summarise([]), tmp_path) == []
