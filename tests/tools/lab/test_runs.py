"""The file of runs: what is asked twice is done once, cells are read back as they were, and texts have a worth."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from helpers import tiny
from helpers.studies import GREEDY, cell_of, profile_of, record
from selfspec.accept import TokenLevel, TopKTolerance
from selfspec.draft import Assistant, ExitHead
from selfspec.errors import BenchError, StorageError, StudyError
from selfspec.measure.estimate import Estimate
from selfspec.measure.spare_cores import SpareCores
from selfspec.model.early_head import DraftHead
from selfspec.model.identity import Vocabulary
from selfspec.tools.index import write_corpus
from selfspec.tools.lab.arms import ArmSpec, Cell, Prompts, RuntimeName
from selfspec.tools.lab.bench_report import by_prompt, quality_sentence
from selfspec.tools.lab.drafts import Given, content
from selfspec.tools.lab.measured import KIND, MeasuredCell
from selfspec.tools.lab.pass_costs import PassCosts, PeakMemory
from selfspec.tools.lab.record import Record, differing, nats_of, p_value, qualities
from selfspec.tools.lab.runs import FILE, Asked, Origin, Run, Runs, told_apart
from selfspec.tools.lab.session import Part, Session
from selfspec.tools.lab.turns import TextAgreement

ASKED = [Asked("estimate", {"draft": f"exit:{number}"}, {"text": "w"}) for number in range(4)]


def found(asked: Sequence[Asked]) -> list[Mapping[str, Any]]:
    return [{"value": each.under["draft"]} for each in asked]


def test_what_is_kept_is_read_again_and_not_done_again(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.find_out(ASKED[:2], found, {"torch": "2"})
    again = Runs(tmp_path)
    assert [run.found["value"] for run in again.of_kind("estimate")] == ["exit:0", "exit:1"]
    assert again[ASKED[0]] == runs[ASKED[0]]
    done: list[Asked] = []

    def counted(asked: Sequence[Asked]) -> list[Mapping[str, Any]]:
        done.extend(asked)
        return found(asked)

    again.find_out(ASKED, counted, {})
    assert done == ASKED[2:]
    assert len((tmp_path / FILE).read_text().splitlines()) == 4


def test_of_one_thing_the_latest_counts_where_the_first_was(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.keep([Run(ASKED[0], {"value": 1}), Run(ASKED[1], {"value": 2}), Run(ASKED[0], {"value": 3})])
    for each in (runs, Runs(tmp_path)):
        assert [run.found["value"] for run in each.of_kind("estimate")] == [3, 2]
    # What things are called does not change them.
    assert Asked("costs", {"a": 1}, {"model": "x"}).key == Asked("costs", {"a": 1}).key
    assert len({Asked("costs", {"a": 1}).key, Asked("texts", {"a": 1}).key, Asked("costs", {"a": 2}).key}) == 3


def test_a_line_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.find_out(ASKED[:2], found, {})
    file = tmp_path / FILE
    file.write_text(file.read_text()[:-20])
    again = Runs(tmp_path)
    assert ASKED[1] not in again
    again.find_out(ASKED[1:2], found, {})
    assert len(file.read_text().splitlines()) == 2
    assert ASKED[1] in Runs(tmp_path)


def test_a_place_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        Runs(tmp_path / "file")
    runs = Runs(tmp_path / "folder")
    (tmp_path / "folder").write_text("")
    with pytest.raises(StorageError, match="what was measured before is kept"):
        runs.find_out(ASKED[:1], found, {})


def test_times_beside_other_work_are_doubted(tmp_path: Path) -> None:
    around = {"device": "cpu", "threads": 2}
    Runs(tmp_path).keep([Run(ASKED[0], {"value": 1}, environment=around, load=SpareCores(2, 0.6))])
    doubt: Any = Runs(tmp_path)[ASKED[0]].doubt
    assert "of 2 cores 0.6 were free for 2 threads" in doubt
    for run in (
        Run(ASKED[0], {}, environment=around, load=SpareCores(2, 1.8)),
        Run(ASKED[0], {}, environment=around),
        Run(ASKED[0], {}, environment={**around, "device": "gpu"}, load=SpareCores(2, 0.6)),
    ):
        assert run.doubt is None


CHANGES: dict[str, Callable[[PreTrainedModel], object]] = {
    "tuned": lambda model: model.model.layers[2].mlp.up_proj.weight.data[3].mul_(1.1),
    "rounded": lambda model: model.to(torch.bfloat16).to(torch.float64),
    "in float32": lambda model: model.float(),
    "configured": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    "ending": lambda model: setattr(model.generation_config, "eos_token_id", [3, 4]),
    "eager": lambda model: model.set_attn_implementation("eager"),
    "on more threads": lambda _: torch.set_num_threads(torch.get_num_threads() + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_figures_depend_on_makes_another(change: str) -> None:
    # Its weights are values of float32.
    model, threads = tiny.llama().float().double(), torch.get_num_threads()
    before = Origin.of(model)
    try:
        CHANGES[change](model)
        after = Origin.of(model)
    finally:
        torch.set_num_threads(threads)
    assert after.setting != before.setting
    assert (after.base == before.base) == (change not in ("tuned", "rounded"))


def test_where_a_model_lies_makes_none(tmp_path: Path) -> None:
    model = tiny.llama()
    before = Origin.of(model)
    model.save_pretrained(tmp_path / "model")
    model.generate(tiny.prompt(4), max_new_tokens=2, do_sample=False)
    assert Origin.of(model) == before
    assert Origin.of(type(model).from_pretrained(tmp_path / "model", dtype=model.dtype)) == before
    with pytest.raises(BenchError, match="not in memory: load the model whole"):
        Origin.of(model.to("meta"))


def test_models_of_one_name_are_called_by_their_weights() -> None:
    assert told_apart([("a", "1" * 20), ("b", "2" * 20), ("a", "3" * 20), ("a", "1" * 20)]) == {
        ("a", "1" * 20): "a 11111111",
        ("b", "2" * 20): "b",
        ("a", "3" * 20): "a 33333333",
    }


class Mild(TokenLevel):
    def __init__(self, by: float) -> None:
        self.by = by


def _head(by: float) -> ExitHead:
    adapter = nn.Linear(2, 2)
    nn.init.constant_(adapter.weight, by)
    nn.init.zeros_(adapter.bias)
    return ExitHead(2, DraftHead(adapter, torch.tensor([1, 2, round(10 * by)])), "base")


@pytest.mark.parametrize(
    "made",
    [
        lambda by: Assistant(tiny.llama(seed=round(10 * by))),
        _head,
        Mild,
        lambda by: profile_of(tiny.llama(), replace(GREEDY, speedup=(by, by, by))),
    ],
)
def test_drafts_and_rules_of_one_name_are_told_apart(made: Callable[[float], Any]) -> None:
    assert content(made(0.5)) == content(made(0.5)) != content(made(0.7))


def test_two_of_one_name_are_not_studied_at_once() -> None:
    drafts = [Assistant(tiny.llama(seed=seed)) for seed in range(2)]
    with pytest.raises(StudyError, match="2 of what is given are called Assistant"):
        Given.of(drafts)


SPECS = [ArmSpec("generate"), ArmSpec("plain"), ArmSpec("draft", "lookup+exit:2")]
CELLS = {Cell("w", temperature, 1, 6, 16): [Prompts.of_one_length(torch.arange(6)[None])] for temperature in (0.0, 0.8)}
# Every arm warms up once and is timed once, on one batch.
STEPS = 2
SPEED: frozenset[Part] = frozenset({"speed"})


class Notes:
    def __init__(self, interrupted_at: int = 99) -> None:
        self.steps: list[str] = []
        self.expected = 0
        self._interrupted_at = interrupted_at

    def begin(self, steps: int) -> None:
        self.expected = steps

    def step(self, what: str) -> None:
        if len(self.steps) == self._interrupted_at:
            raise KeyboardInterrupt
        self.steps.append(what)


def run(
    model: PreTrainedModel,
    folder: Path,
    watch: Notes | None = None,
    specs: list[ArmSpec] = SPECS,
    parts: frozenset[Part] = SPEED,
) -> list[MeasuredCell]:
    session = Session(name="tiny", place=None, model=model, specs=specs, repeats=1, warm_up=1, parts=parts)
    return session.measure(CELLS, Runs(folder), watch or Notes())


def kept(folder: Path) -> list[MeasuredCell]:
    return [MeasuredCell.of(each) for each in Runs(folder).of_kind(KIND)]


def test_whatever_may_be_kept_is_read_back(tmp_path: Path) -> None:
    some = Estimate(0.2, 0.1, 0.3, 0.9)
    costs = PassCosts(some, some, {2: some, 4: some}, {1: some, 4: some}, some)
    specs = [ArmSpec("draft", "exit:1", 4, 8, "token", runtime=name) for name in RuntimeName]
    assert len({spec.name for spec in specs}) == len(specs)
    full = replace(
        record("draft", [[1.0]]),
        agreement=TextAgreement(2, 1, 0.5, 0.25),
        memory=PeakMemory(1, 2, "system"),
        costs=costs,
        nats=[[[1.5]]],
    )
    absent = replace(record("static", []), absence="no compiler")
    cell = cell_of(absent, *(replace(full, arm=spec) for spec in specs), free=0.5)
    Runs(tmp_path).keep([cell.run])
    assert kept(tmp_path) == [cell]
    assert (cell.arms[0].absence, cell.arms[0].scored) == ("no compiler", False)
    with pytest.raises(BenchError, match="no result of this version"):
        MeasuredCell.of(Run(Asked(KIND, {"cell": 1}), {"arms": []}))


def test_a_cell_is_not_run_again(llama: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(llama, tmp_path, Notes(interrupted_at=STEPS * len(SPECS)))
    watch = Notes()
    measured = run(llama, tmp_path, watch)
    assert len(watch.steps) == watch.expected == STEPS * len(SPECS)
    assert set(watch.steps) == {f"cell 1 of 1: {[*CELLS][1].title}"}
    assert [each.cell for each in measured] == list(CELLS)
    again = Notes()
    assert run(llama, tmp_path, again, SPECS[:2]) == measured
    assert (again.expected, again.steps) == (0, [])


@pytest.mark.tools
def test_another_arm_or_model_is_measured_with_all_the_others(llama: PreTrainedModel, tmp_path: Path) -> None:
    run(llama, tmp_path)
    measured = run(llama, tmp_path, specs=[*SPECS, ArmSpec("draft", "exit:1")])
    assert [len(each.arms) for each in measured] == [4, 4]
    # Of each cell the latest run counts.
    assert kept(tmp_path) == measured
    run(tiny.llama(dtype=torch.float32), tmp_path)
    assert len(kept(tmp_path)) == 4


def test_texts_and_counts_of_each_prompt_are_rows(llama: PreTrainedModel, tmp_path: Path) -> None:
    measured = run(llama, tmp_path)
    assert all(record.rounds for each in measured for record in each.arms[1:])
    assert measured[0].load.cores >= 1
    rows = by_prompt(measured)
    assert len(rows) == len(CELLS) * len(SPECS)
    assert all(len(row["token_ids"]) == row["new_tokens"] == 16 for row in rows)
    assert {row["call_passes"] for row in rows if row["arm"] == "selfspec plain"} == {16}
    assert all(len(row["call_judged_by_depth"]) == len(row["call_accepted_by_depth"]) for row in rows)


@pytest.mark.tools
def test_acceptance_alone_decodes_each_prompt_once(llama: PreTrainedModel, tmp_path: Path) -> None:
    watch, corpus = Notes(), tmp_path / "corpus.safetensors"
    write_corpus(corpus, [[1, 2, 3, 4]], Vocabulary.of(llama))
    drafts = [ArmSpec("draft", name, length=2) for name in ("exit:1", "int8", f"suffix:{corpus}", "recycle")]
    measured = run(llama, tmp_path, watch, drafts, frozenset({"acceptance", "quality"}))
    assert len(watch.steps) == len(drafts) * len(CELLS)
    for each in measured:
        assert not each.timed
        # Of a single prompt there are no intervals.
        (doubt,) = each.doubts
        assert doubt.startswith("all prompts had as many tokens a pass (selfspec exit:1")
        assert all(found.decoding_tokens_per_second is None for found in each.figures.values())
        assert all(found.mean_accepted_length.value >= 1 for found in each.figures.values())
        assert each.qualities.keys() == {record.arm for record in each.arms}
    # A further draft leaves those that were counted as they are; a draft that has changed is another.
    more = ArmSpec("draft", "exit:2", length=2)
    write_corpus(corpus, [[3, 4, 5]], Vocabulary.of(llama))
    watch = Notes()
    both = run(llama, tmp_path, watch, [more, *drafts[:3]], frozenset({"acceptance", "quality"}))
    assert len(watch.steps) == 2 * len(CELLS)
    assert [record.arm.draft for record in both[0].arms] == [spec.draft for spec in (more, *drafts)]
    found = {record.arm.draft: record.arm.content for record in both[0].arms}
    before = {record.arm.draft: record.arm.content for record in measured[0].arms}
    assert {draft for draft in before if found[draft] != before[draft]} == {drafts[2].draft}
    assert both[0].arms[1] == measured[0].arms[0]
    # Other figures are measured anew.
    watch = Notes()
    run(llama, tmp_path, watch, drafts, frozenset({"acceptance"}))
    assert len(watch.steps) == len(drafts) * len(CELLS)


PLAIN, EXIT = ArmSpec("plain"), ArmSpec("draft", "exit:2", accept="block")


@dataclass(frozen=True)
class Loose(TopKTolerance):
    top_k: int = 50
    tolerance: float = 20.0


RELAXED = ArmSpec("draft", "exit:2", length=3, accept=f"{__name__}:Loose", lossless=False)


def made(arm: ArmSpec, nats: Sequence[float]) -> Record:
    """Texts of 16 tokens with so many nats a token, one for each call."""
    base = record("plain", [[1.0] * len(nats)])
    return replace(base, arm=arm, nats=[[[16 * each] for each in nats]])


def test_nats_are_those_of_the_text_after_its_prompt(stories: PreTrainedModel) -> None:
    prompt, row = [5, 6, 7], [8, 9]
    ids = torch.tensor([[*prompt, *row]])
    ((found,),) = nats_of(stories, [Prompts.of_one_length(torch.tensor([prompt]))], [[row]])
    with torch.no_grad():
        logs = stories(ids).logits[0].log_softmax(-1)
    assert found == pytest.approx(-float(logs[2, 8] + logs[3, 9]), rel=1e-5)


def test_perplexities_have_intervals_and_pairs_have_ratios() -> None:
    worse = made(EXIT, [0.2, 0.5, 0.2, 0.3, 0.1, 0.2])
    plain = made(PLAIN, [each - 0.1 for each in [0.2, 0.5, 0.2, 0.3, 0.1, 0.2]])
    found = qualities([plain, worse])
    assert found[EXIT].perplexity.value == pytest.approx(math.exp(0.25))
    assert found[EXIT].perplexity.low < math.exp(0.25) < found[EXIT].perplexity.high
    ratio: Any = found[EXIT].against_plain
    # In pairs there is no spread, however far apart prompts are.
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(0.1), math.exp(0.1)))
    assert found[EXIT].p_value == pytest.approx(2 / 2**6)
    assert found[PLAIN].p_value is None


def test_signs_are_tested_and_not_only_their_spread() -> None:
    assert p_value([1.0, -1.0, 2.0, -2.0]) == 1.0
    assert p_value([1.0] * 20) < 0.001
    generator = random.Random(0)
    chance = [p_value([generator.gauss(0, 1) for _ in range(8)]) for _ in range(200)]
    assert sum(each <= 0.05 for each in chance) <= 20


def test_many_comparisons_do_not_make_a_difference() -> None:
    """Each of twenty arms is off by chance, some alone beyond 5 %; together none is."""
    generator = random.Random(11)
    base = [0.5] * 12
    arms = [replace(EXIT, length=number) for number in range(1, 21)]
    records = [made(arm, [each + generator.gauss(0, 0.1) for each in base]) for arm in arms]
    found = qualities([made(PLAIN, base), *records])
    assert any(each.p_value is not None and each.p_value < 0.05 for each in found.values())
    assert differing(found) == []
    assert "No arm's texts" in quality_sentence(cell_of(made(PLAIN, base), *records))
    off = made(RELAXED, [1.5] * 12)
    assert RELAXED.name in quality_sentence(cell_of(made(PLAIN, base), off))


def test_a_rule_that_is_not_lossless_is_not_refused_for_its_texts() -> None:
    differs = TextAgreement(4, 1)
    lossless = replace(record("draft", [[1.0]], "exit:2"), agreement=differs)
    assert lossless.refused
    relaxed = replace(lossless, arm=RELAXED)
    assert relaxed.scored
    assert not relaxed.refused


def test_without_plain_decoding_nothing_is_said_to_be_like_it() -> None:
    said = quality_sentence(cell_of(made(EXIT, [0.5, 0.2]), made(RELAXED, [0.1, 0.2])))
    assert said == "There are no texts by plain decoding to compare these with."
