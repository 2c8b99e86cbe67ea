"""Searches for skip sets, what sublayers and drafts cost, and reports of studies, which stand by themselves."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from html import unescape
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from helpers import tiny
from helpers.studies import declared, known, stories_loader
from selfspec.control.costs import Costs
from selfspec.draft import EarlyExit, LayerSkip
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import DraftConfigError, StudyError
from selfspec.measure.costs import MeasuredCosts
from selfspec.measure.estimate import Estimate
from selfspec.measure.teacher_forced import LayerViews, TeacherForcedText, parts_run
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.registry import find_adapter
from selfspec.tools.lab import ablation, report
from selfspec.tools.lab.ablation import Finding, work_on
from selfspec.tools.lab.drafts import Space, draft_kind
from selfspec.tools.lab.estimates import confirm
from selfspec.tools.lab.report import BLACK, GREY, Mark, mark_of, marks_of
from selfspec.tools.lab.runs import Asked, Run, Runs
from selfspec.tools.lab.search import evaluate, search, sets_by_similarity, speed
from selfspec.tools.lab.study import StudiedModel, texts_of
from selfspec.tools.lab.study_report import TextFindings, draw, findings, page, printable, row_agrees, write_report
from selfspec.tools.lab.table import (
    Prices,
    SublayerPrices,
    best_length,
    costs_asked,
    pareto_front,
    prices_by_measurement,
    prices_by_weights,
    speedups,
    timed_paths,
)

pytest.importorskip("pandas")

STUDY = declared(drafts="sublayers", temperatures=1.0, draft_lengths=[1, 2, 4], max_new_tokens=34, reach=1)


@pytest.fixture(scope="module")
def studied() -> StudiedModel:
    return stories_loader()("")


def _space(studied: StudiedModel, fewest: int, most: int) -> Space:
    return Space.of(studied.model, studied.adapter, fewest, most)


@pytest.mark.tools
def test_in_a_third_of_the_evaluations_it_finds_the_best_pair(studied: StudiedModel, tmp_path: Path) -> None:
    space = _space(studied, 2, 2)
    everything = evaluate(Runs(tmp_path), STUDY, studied, list(map(frozenset, combinations(space.choices, 2))))
    assert len(everything) == 45
    found = search(studied, STUDY, space, evaluations=15)
    assert max(found, key=speed) == max(everything, key=speed)
    assert len(found) == len({row["draft"] for row in found}) == 15


@pytest.mark.tools
def test_the_front_holds_what_nothing_beats(studied: StudiedModel) -> None:
    found = search(studied, STUDY, _space(studied, 1, 5), evaluations=40)
    assert all(1 <= row["skipped"] <= 5 for row in found)
    front = pareto_front(found)
    assert max(row["alpha"] for row in found) == front[-1]["alpha"]
    for row in front:
        assert not any(other["alpha"] >= row["alpha"] and other["c"] <= row["c"] and other != row for other in found)


def test_a_search_takes_over_what_a_study_found_and_leaves_other_sets_alone(
    studied: StudiedModel, tmp_path: Path
) -> None:
    runs = Runs(tmp_path)
    work_on(STUDY, lambda name: studied, runs)
    before = len(runs.of_kind("estimate"))
    # There are no more sets of one sublayer.
    assert len(search(studied, STUDY, _space(studied, 1, 1), 40, runs)) == before == len(runs.of_kind("estimate")) == 10
    pairs = search(studied, STUDY, _space(studied, 2, 2), 4, runs)
    assert [row["skipped"] for row in pairs] == [2] * 4


def test_a_set_that_cannot_be_judged_is_said(studied: StudiedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> list[dict[str, Any]]:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(ablation, "estimate", fails)
    with pytest.raises(StudyError, match="of all things"):
        search(studied, STUDY, _space(studied, 1, 1), evaluations=2)


def _text() -> tuple[TeacherForcedText, Space, Prices]:
    model = tiny.llama()
    adapter = find_adapter(model)
    text = TeacherForcedText(LayerViews(model, adapter), tiny.prompt(12, batch=2), 4)
    return text, Space.of(model, adapter, 2, 2), prices_by_weights(model, adapter)


@torch.no_grad()
def test_with_nothing_dropped_it_finds_the_most_similar_sets() -> None:
    text, space, prices = _text()

    def similarity(skipped: frozenset[Sublayer]) -> float:
        states = text.exact(0)
        for layer, parts in enumerate(parts_run(LayerPath.without(tiny.DEPTH, skipped))):
            states = text.run(layer, parts, states)
        return float(
            torch.cosine_similarity(states[:, 3:-1].float(), text.exact(tiny.DEPTH)[:, 3:-1].float(), -1).mean()
        )

    one_by_one = sorted(map(frozenset, combinations(space.choices, 2)), key=lambda each: -similarity(each))
    assert sets_by_similarity(text, space, prices, width=1000) == one_by_one
    found = sets_by_similarity(text, space, prices, width=2)
    assert set(found) < set(one_by_one)
    assert found[0] in one_by_one[:5]


@pytest.mark.parametrize(("fewest", "most"), [(0, 2), (3, 2), (1, 8), (9, None)])
def test_a_space_without_sets_is_refused(fewest: int, most: int | None) -> None:
    model = tiny.llama()
    with pytest.raises(DraftConfigError, match=r"choose from 1\.\.7"):
        Space.of(model, find_adapter(model), fewest, most)


_DEPTH = 4


def _measured(draft: dict[str, Estimate]) -> MeasuredCosts:
    """Passes of two widths, and an overhead, that are the same for all drafts."""
    draft = {**draft, "none": known(0.0)}
    verify = {name: {1: known(1.0), 3: known(1.2)} for name in draft}
    overhead = dict.fromkeys(draft, known(0.05))
    return MeasuredCosts(known(0.01), draft, verify, overhead, context=8, batch=1, lengths=(1,))


def _judged(draft: str, **found: Any) -> Run:
    return Run(Asked("estimate", {"draft": draft}), found)


def test_what_each_sublayer_costs_is_found_from_drafts_that_differ_in_them() -> None:
    fixed, attention, mlp = 0.12, 0.1, 0.12
    drafters: dict[str, LayerPathDrafter] = {
        "exit:2": EarlyExit(2),
        "a": LayerSkip(attention=[1, 2]),
        "m": LayerSkip(mlp=[0, 3]),
    }

    def cost(path: LayerPath) -> float:
        ran = [each.part for each in path_of(path)]
        return fixed + attention * ran.count(Part.ATTENTION) + mlp * ran.count(Part.MLP)

    def path_of(path: LayerPath) -> list[Sublayer]:
        return [Sublayer(layer, part) for layer in range(_DEPTH) for part in Part if path.runs(Sublayer(layer, part))]

    measured = _measured({name: known(cost(each.path(_DEPTH))) for name, each in drafters.items()})
    prices = prices_by_measurement(measured, drafters, _DEPTH)
    assert prices.sublayers.fixed == pytest.approx(fixed)
    assert prices.of_part(Part.ATTENTION) == pytest.approx(attention)
    assert prices.of_part(Part.MLP) == pytest.approx(mlp)
    assert prices.costs(LayerPath.full(_DEPTH)).draft == pytest.approx(1.0)
    assert prices.costs(EarlyExit(2).path(_DEPTH)).draft == pytest.approx(cost(EarlyExit(2).path(_DEPTH)))
    target = prices.target
    assert [target.verify, target.widening, target.overhead] == pytest.approx([1.0, 0.1, 0.05])
    assert prices.step_seconds == 0.01


def test_prices_add_up_to_a_plain_step() -> None:
    model = tiny.llama()
    prices = prices_by_weights(model, find_adapter(model))
    assert prices.costs(LayerPath.full(tiny.DEPTH)).draft == pytest.approx(1.0)
    nothing_of_two = LayerPath.without(tiny.DEPTH, [Sublayer(2, part) for part in Part])
    expected = 1 - prices.of_part(Part.ATTENTION) - prices.of_part(Part.MLP)
    assert prices.costs(nothing_of_two).draft == pytest.approx(expected)
    costs = prices.costs(nothing_of_two)
    # Two of four layers are exact: only the rest of the target pass grows with the draft.
    exact = 2 * (prices.of_part(Part.ATTENTION) + prices.of_part(Part.MLP))
    assert costs.widening == pytest.approx(prices.target.widening * (1 - exact))
    asked = Asked("costs", {})
    assert Prices.of(Run(asked, {"prices": json.loads(json.dumps(asdict(prices)))})) == prices


def test_what_is_promised_is_tokens_by_cost_of_a_round() -> None:
    lengths = {
        str(length): {"mean_accepted_length": {"value": tokens, "low": tokens - 0.5, "high": tokens + 0.5}}
        for length, tokens in enumerate((1.8, 2.5, 2.6), 1)
    }
    estimated = Run(Asked("estimate", {"draft": "exit:2"}), {"lengths": lengths})
    parts = SublayerPrices(0.0, [0.25] * 4, [0.25] * 4)
    timed, c = {"exit:2": Costs(0.2, 1.0, 0.1, 0.05)}, {"exit:2": known(0.2)}
    prices = Prices(parts, parts, parts, Costs(0.0), known=timed, known_draft=c)
    promised = speedups(estimated, prices)
    assert best_length(promised) == 2
    assert promised[2].value == pytest.approx(2.5 / (0.4 + 1.2 + 0.05))
    assert promised[2].low == pytest.approx(2.0 / (0.4 + 1.2 + 0.05))


def test_a_study_of_exits_and_a_search_ask_for_the_same_costs() -> None:
    studied = stories_loader()("")
    exits = costs_asked(studied, ("exit:1", "exit:2"), "measured")
    assert exits.key == costs_asked(studied, ["skip:attn=1;mlp=2"], "measured").key
    assert exits.key == costs_asked(studied, [], "measured").key
    # Exits and skip sets alike: with them alone one sublayer would cost what is left over.
    assert {draft_kind(name) for name in timed_paths(studied.depth)} == {"exit", "skip"}


def test_intervals_of_what_was_timed_are_those_of_c() -> None:
    drafters: dict[str, LayerPathDrafter] = {"exit:2": EarlyExit(2), "m": LayerSkip(mlp=[0, 3])}
    measured = _measured({"exit:2": Estimate(0.55, 0.5, 0.6), "m": Estimate(0.75, 0.7, 0.8)})
    found = prices_by_measurement(measured, drafters, _DEPTH).draft(_judged("exit:2"))
    assert found.value == pytest.approx(0.55)
    assert (found.low, found.high) == pytest.approx((0.5, 0.6))


@pytest.fixture(scope="module")
def finding() -> Finding:
    """A study with one draft confirmed on each text, greedily and sampled."""
    return work_on(declared(drafts=["exits", "sublayers", "layers"], confirm=1), stories_loader(), Runs(None))


@pytest.fixture(scope="module")
def shown(finding: Finding) -> list[TextFindings]:
    return findings(finding)


@pytest.fixture(autouse=True, scope="module")
def coarse() -> Iterator[None]:
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


Drawn = Callable[[list[TextFindings]], list[Figure]]


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Draws, and returns the figures instead of writing them."""

    def figures(shown: list[TextFindings]) -> list[Figure]:
        found: list[Figure] = []

        def keep(figure: Figure, file: Path, **_: object) -> None:
            file.touch()
            found.append(figure)

        with monkeypatch.context() as patched:
            patched.setattr(Figure, "savefig", keep)
            draw(shown, tmp_path)
        return found

    return figures


def test_notes_are_inside_the_pictures(shown: list[TextFindings], drawn: Drawn) -> None:
    figures = drawn(shown[:1])
    assert len(figures) >= 4
    for figure in figures:
        figure.draw_without_rendering()
        box = figure.texts[0].get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1


@pytest.mark.tools
def test_no_draft_is_marked_best_where_none_gains(shown: list[TextFindings], drawn: Drawn) -> None:
    def marks(most: float) -> int:
        """Frames and circles where the best draft promises so much."""
        top = shown[0].best[0]["predicted_speedup"]
        rows = [{**row, "predicted_speedup": row["predicted_speedup"] / top * most} for row in shown[0].rows]
        every = [axes for figure in drawn([replace(shown[0], rows=rows)]) for axes in figure.axes]
        rings = [each for axes in every for each in axes.collections if isinstance(each, PathCollection)]
        marked = [each for each in rings if each.get_sizes().tolist() == [60]]
        return len(marked) + sum(len(axes.patches) for axes in every)

    assert marks(1.25) > 0
    assert marks(0.9) == 0


def test_a_heat_map_of_many_layers_has_ticks_and_no_numbers(tmp_path: Path) -> None:
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


def test_a_kind_has_its_colour_in_every_picture_and_a_cascade_is_hollow() -> None:
    assert mark_of(None).colour == BLACK
    assert mark_of("exit:2").colour == mark_of("exit:4+vocab:words.json").colour == mark_of("exit").colour
    assert mark_of("int8+int4").colour == mark_of("lookup+int8").colour
    assert mark_of("exit:2").colour != mark_of("int8").colour
    assert mark_of("something else").colour == GREY
    assert mark_of("exit:4").filled
    assert not mark_of("lookup+exit:4").filled
    # Drafts of one kind are told apart.
    marks = marks_of(["exit:2", "exit:3", "skip:attn=1", "exit:4"])
    looks = {(mark.colour, mark.dashes, mark.marker) for mark in marks.values()}
    assert len(looks) == 4
    assert marks["exit:2"] == mark_of("exit:2")
    assert len({mark.dashes for mark in marks_of([f"exit:{layer}" for layer in range(1, 7)]).values()}) == 6
