"""Studies, in files and in Python: what they may say, and that all that was to be found out is, once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import selfspec
from helpers import tiny
from helpers.encoder_decoders import encoder_decoder
from helpers.shrunken import shrunken
from helpers.studies import Guess, Notes, declared, stories_loader
from selfspec.accept import TokenLevel
from selfspec.errors import StudyError, UnsupportedModelError
from selfspec.measure import stock
from selfspec.measure import teacher_forced as passes
from selfspec.model.registry import find_adapter
from selfspec.tools.lab import ablation
from selfspec.tools.lab.ablation import Finding, estimate, work_on
from selfspec.tools.lab.arms import usual_runtime_name
from selfspec.tools.lab.drafts import named_drafts, skip_set
from selfspec.tools.lab.runs import Row, Run, Runs
from selfspec.tools.lab.study import StudiedModel, Study, read_study
from selfspec.tools.lab.table import records

pandas = pytest.importorskip("pandas")

Load = Callable[[str], StudiedModel]


@pytest.fixture(scope="module")
def load() -> Load:
    return stories_loader()


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counted: Counter[str] = Counter()
    find_out = Runs.find_out

    def counting(runs: Runs, asked: Sequence[Run], find: Any, environment: Mapping[str, Any]) -> None:
        def noted(some: Sequence[Run]) -> Any:
            counted.update(each.key for each in some)
            return find(some)

        find_out(runs, asked, noted, environment)

    monkeypatch.setattr(Runs, "find_out", counting)
    return counted


def test_a_study_is_done_once_and_grows(load: Load, tmp_path: Path, done: Counter[str]) -> None:
    first = work_on(declared(), load, Runs(tmp_path))
    assert not first.failed
    # Exits and sublayers, at two temperatures and two lengths.
    assert len(first.table) == (4 + 10) * 2 * 2
    assert set(done.values()) == {1}
    count = done.total()
    again = work_on(declared(), load, Runs(tmp_path))
    assert again.table.equals(first.table)
    assert done.total() == count
    # A longer study takes over what a shorter one found out.
    work_on(declared(drafts=["exits", "sublayers", "layers"]), load, Runs(tmp_path))
    assert done.total() == count + 5 * 2


@pytest.mark.tools
def test_prompts_are_whole_and_texts_end_where_the_model_ends_them(load: Load) -> None:
    studied = load("stories")
    # Of several lengths; the model's most likely third token ends a text.
    prompts = [torch.randint(3, 400, (1, length), generator=torch.Generator().manual_seed(length)) for length in (4, 9)]
    own = StudiedModel("stories", studied.model, studied.adapter, {"given": prompts}, studied.tokenizer)
    asked = declared(drafts=["exit:4"], temperatures=[0.0], texts=2, confirm=1)
    before = studied.model.generation_config.eos_token_id
    studied.model.generation_config.eos_token_id = None
    try:
        free = _texts(work_on(asked, lambda name: own, Runs(None)))
        studied.model.generation_config.eos_token_id = free[0][1][2]
        ended = work_on(asked, lambda name: own, Runs(None))
    finally:
        studied.model.generation_config.eos_token_id = before
    texts = _texts(ended)
    assert [prompt for prompt, _ in texts] == [prompt[0].tolist() for prompt in prompts]
    for (_, whole), (_, text) in zip(free, texts, strict=True):
        assert text == whole[: len(text)]
        assert len(text) == len(whole) or text[-1] == free[0][1][2]
    assert len(texts[0][1]) <= 3
    estimated, confirmed = pairs(ended)
    # Greedily the estimate is the generation itself, whatever ends its texts.
    assert confirmed["equal"] == 1.0
    assert confirmed["acceptance_rate"] == pytest.approx(estimated["acceptance_rate"])
    assert confirmed["new_tokens"] == sum(len(text) for _, text in texts)


def pairs(finding: Finding) -> list[Row]:
    """The lines of a single confirmed draft at the length that was confirmed: estimated, and generated."""
    lines = records(finding.table)
    (confirmed,) = [row for row in lines if "speedup" in row]
    (estimated,) = [
        row
        for row in lines
        if "speedup" not in row and all(row[name] == confirmed[name] for name in ("draft", "draft_length"))
    ]
    return [estimated, confirmed]


def _texts(finding: Finding) -> list[tuple[list[int], list[int]]]:
    written = [row for row in finding.rows if row["measured"] == "text"]
    return [(row["token_ids"][: row["prompt_tokens"]], row["token_ids"][row["prompt_tokens"] :]) for row in written]


def test_what_goes_wrong_with_a_draft_is_its_result(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(studied: StudiedModel, texts: Any, temperature: float, runs: Sequence[Run]) -> list[list[Row]]:
        if any(run.under["draft"] == "exit:3" for run in runs):
            raise ZeroDivisionError("of all things")
        return estimate(studied, texts, temperature, runs)

    monkeypatch.setattr(ablation, "estimate", fails)
    finding = work_on(declared(drafts=["exits"], temperatures=[0.0]), load, Runs(None))
    (failed,) = finding.failed
    assert failed["draft"] == "exit:3"
    assert failed["error"].startswith("ZeroDivisionError: of all things (test_ablation.py:")
    table = finding.table
    assert set(table[table["error"].isna()]["draft"]) == {"exit:1", "exit:2", "exit:4"}


def test_an_interrupt_keeps_what_was_finished(load: Load, tmp_path: Path, done: Counter[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        work_on(declared(), load, Runs(tmp_path), Notes(interrupted_at=80))
    assert done.total() >= 10
    work_on(declared(), load, Runs(tmp_path))
    assert set(done.values()) == {1}


def test_one_model_is_not_named_twice(load: Load) -> None:
    with pytest.raises(StudyError, match="same weights"):
        work_on(declared(models=["a", "b"], drafts="exit:1", temperatures=0.0), load, Runs(None))


@pytest.mark.tools
def test_drafts_of_any_kind_are_judged_by_generation_and_timed_by_what_they_run(load: Load) -> None:
    drafts = ["exit:3", "int8", "lookup", "lookup+exit:3"]
    finding = work_on(declared(drafts=drafts, draft_lengths=[2], temperatures=[0.0]), load, Runs(None))
    assert not finding.failed
    rows = {row["draft"]: row for row in records(finding.table)}
    assert [rows[name]["measured"] for name in drafts] == ["teacher forcing", *["generation"] * 3]
    # Passes run as `bench` runs them.
    assert rows["int8"]["runtime"] == usual_runtime_name(torch.device("cpu"))
    assert (rows["lookup"]["c"], rows["lookup"]["kind"]) == (0.0, "lookup")
    assert rows["lookup"]["drafting_share"] < 1
    assert 0 < rows["int8"]["c"] < 1
    assert rows["lookup+exit:3"]["c"] == rows["exit:3"]["c"]
    for row in rows.values():
        assert row["n"] == 3
        assert row["new_tokens"] / row["rounds"] == pytest.approx(row["mean_accepted_length"])


@pytest.mark.parametrize("draft", ["exit:3", "skip:attn=3;mlp=1", "skip:attn=2"])
def test_greedily_generation_counts_what_teacher_forcing_says(
    load: Load, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At every position of a draft, however long.
    asked = declared(drafts=draft, temperatures=[0.0], draft_lengths=[1, 4])
    names = ("judged_by_position", "accepted_by_position", "new_tokens", "rounds")

    def found() -> list[list[Any]]:
        return [[row[name] for name in names] for row in records(work_on(asked, load, Runs(None)).table)]

    forced = found()
    monkeypatch.setattr(ablation, "is_judged_by_teacher_forcing", lambda *_: False)
    for said, generated in zip(forced, found(), strict=True):
        judged = len(generated[0])
        assert said[0][:judged] == pytest.approx(generated[0])
        assert sum(said[0][judged:]) == 0
        assert said[1][:judged] == pytest.approx(generated[1])
        assert said[2:] == pytest.approx(generated[2:])


def test_a_file_declares_a_study(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('models = "demo"\ntemperatures = [0, 0.8]\ntexts = 4\nruntime = "eager"\n')
    one = read_study(tmp_path / "a.toml")
    assert one == Study(("demo",), temperatures=(0.0, 0.8), texts=4, name="a", runtime="eager")
    assert Study.of(asdict(one)) == one
    assert read_study(tmp_path / "a.toml", {"texts": 2}).texts == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models = [", "is not TOML"),
        ("", "names no models"),
        ('models = "demo"\ndraft = "exits"', "did you mean 'drafts'"),
        ('models = "demo"\nzzz = 1', "known are models"),
        ('models = "demo"\ntexts = 0', "texts: Input should be greater than or equal to 1"),
        ('models = "demo"\ndraft_lengths = []', "draft_lengths: this is empty"),
        ('models = "demo"\ndraft_lengths = [1, 1]', "draft_lengths: this names something twice"),
        ('models = "demo"\nseed = 9223372036854775808', "seed: Input should be less"),
        ('models = "demo"\npricing = "guess"', "pricing: Input should be 'measured' or 'weights'"),
        ('models = "demo"\nruntime = "fast"', "runtime: Input should be 'eager', 'native'"),
        # What is read and means nothing names the file.
        *((f"{name} = {'1' * 5000}", r"a\.toml") for name in ("texts", "models")),
        *((f'models = "demo"\ntemperatures = [{each}]', r"a\.toml") for each in ("1" * 400, "nan", "inf")),
        ("models = " + "[" * 100_000, r"a\.toml"),
        ("models = 0x" + "f" * 5000, r"a\.toml"),
        ('models = "demo"\nseeds = [' + "1" * 40 + "]", r"a\.toml"),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_malformed_is_said(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(StudyError, match=said):
        read_study(tmp_path / "a.toml")


def _names(*names: str) -> list[str]:
    model = tiny.llama()
    return list(named_drafts(names, model, find_adapter(model), seed=0))


def test_drafts_are_named_one_by_one() -> None:
    assert _names("exits") == ["exit:1", "exit:2", "exit:3"]
    assert _names("exit:2", "exit:02", "exits") == ["exit:2", "exit:1", "exit:3"]
    assert _names("layers", "skip:layers=2") == [f"skip:layers={layer}" for layer in range(4)]
    assert _names("pairs") == [f"skip:layers={pair}" for pair in ("0,1", "0,2", "0,3", "1,2", "1,3", "2,3")]
    assert len(_names("sublayers")) == 8
    drawn = _names("random:3x10")
    assert len(set(drawn)) == 10
    assert {len(skip_set(name)) for name in drawn} == {3}
    assert drawn == _names("random:3x10")
    # There are no more than 8 of one sublayer.
    assert len(_names("random:1x50")) == 8
    with pytest.raises(StudyError, match="no skip set"):
        skip_set("exit:2")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exit:9", "out of range"),
        ("exitz", "also knows exits"),
        ("none", "what every draft is compared with"),
        ("random:9x1", "out of range"),
        ("random:many", "random:4x20"),
        ("heads:nowhere", "cannot be read.*selfspec train exit"),
        ("skip-file:nowhere", "cannot be read"),
    ],
)
def test_drafts_that_cannot_be_are_refused(name: str, said: str) -> None:
    with pytest.raises(StudyError, match=said):
        _names(name)


def test_a_reduced_vocabulary_is_another_draft_once_its_file_changes(tmp_path: Path) -> None:
    model, file = tiny.llama(), tmp_path / "words.json"
    found = []
    for tokens in ([1, 2], [1, 3]):
        file.write_text(json.dumps({"tokens": tokens}))
        found.append(named_drafts([f"exit:2+vocab:{file}"], model, find_adapter(model), seed=0))
    assert found[0] != found[1]
    assert found[0].keys() == found[1].keys()


_QUICK: dict[str, Any] = {
    "drafts": ["exits", "sublayers"],
    "max_new_tokens": 8,
    "draft_lengths": [1, 2],
    "temperatures": [0],
    "confirm": 0,
    "pricing": "weights",
}


class Willing(TokenLevel):
    def __init__(self, name: str) -> None:
        self.name = name


def test_drafters_and_rules_are_objects_too(tmp_path: Path) -> None:
    model, own, rule = tiny.llama(), Guess((1, 2)), Willing("mine")
    quick = {**_QUICK, "drafts": [own, "exit:1"], "accept": rule, "confirm": 2}
    table = selfspec.ablate(model, tiny.prompt(4, batch=2), **quick)
    judged = table[table["equal"].isna()]
    assert dict(zip(judged["draft"], judged["measured"], strict=True)) == {
        "exit:1": "teacher forcing",
        repr(own): "generation",
    }
    assert (table["equal"].dropna() == 1).all()
    # What was judged token by token is confirmed so.
    generated = table[table["decoder"] == "draft"]
    assert dict(zip(generated["draft"], generated["accept"], strict=True)) == {repr(own): repr(rule), "exit:1": "token"}
    assert table.attrs["provenance"][0]["weights"]
    assert any("2 texts" in said for said in table.attrs["doubts"])
    untimed: dict[str, Any] = {"accept": [rule], "timed": False, "temperatures": [0], "to": tmp_path}
    found = selfspec.bench(model, [tiny.prompt(4)], [own, "exit:1"], **untimed)
    assert list(found["draft"]) == [repr(own), "exit:1"]
    assert set(found["accept"]) == {repr(rule)}
    assert (found["mean_accepted_length"] >= 1).all()
    assert "doubts" in found.attrs
    assert (tmp_path / "report.md").exists()
    # A name alone is a list of one.
    alone = selfspec.bench(model, [tiny.prompt(4)], "exit:1", timed=False, temperatures=[0])
    assert list(alone["draft"]) == ["exit:1"]


@pytest.mark.parametrize("draft", ["int8", "exit:2"])
def test_a_study_and_a_benchmark_generate_the_same_tokens_by_default(draft: str, tmp_path: Path) -> None:
    """In one arithmetic, which rows name; float32 is what the kernels of int8 are for."""
    model, prompts = tiny.llama(dtype=torch.float32), tiny.prompt(5, batch=3)
    asked: dict[str, Any] = {"temperatures": [0.0], "max_new_tokens": 24}
    study, benchmark = tmp_path / "study", tmp_path / "benchmark"
    selfspec.ablate(model, prompts, drafts=draft, draft_lengths=4, confirm=1, pricing="weights", to=study, **asked)
    selfspec.bench(model, prompts, draft, draft_length=4, timed=False, to=benchmark, **asked)
    names = ("call", "runtime", "token_ids", "rounds", "judged", "accepted")
    one, other = (
        [[row[name] for name in names] for row in Runs(place).measured("generation") if row["draft"] == draft]
        for place in (study, benchmark)
    )
    # One that generation judges is confirmed by the same.
    assert len(other) == 3
    assert {str(each) for each in one} == {str(each) for each in other}


def test_an_architecture_that_cannot_be_judged_says_so_point_by_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_ROUNDING", dict.fromkeys(passes._ROUNDING, -1.0))
    table = selfspec.ablate(tiny.llama(), tiny.prompt(4), **_QUICK)
    assert table["error"].str.contains("measure it by generation").all()
    # Models whose layers keep states are judged by generation.
    prompts = torch.randint(5, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    table = selfspec.ablate(shrunken("lfm2"), prompts, **{**_QUICK, "drafts": "exits"})
    assert set(table["measured"]) == {"generation"}
    assert table["alpha"].between(0, 1).all()


def test_texts_are_whole_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []
    continued = stock.own_text

    def noted(model: Any, prompts: Any, *rest: Any) -> Any:
        read.append(prompts[0].tolist())
        return continued(model, prompts, *rest)

    texts, tokenizer = ["ab", "abcdef"], tiny.tokenizer()
    monkeypatch.setattr(stock, "own_text", noted)
    model = tiny.llama(vocab_size=260)
    selfspec.ablate(model, texts, tokenizer=tokenizer, **{**_QUICK, "drafts": "exit:1"})
    assert read == [tokenizer(text).input_ids for text in texts]


def test_a_model_with_an_encoder_is_refused() -> None:
    model = encoder_decoder("bart", torch.float32, vocab_size=256)
    with pytest.raises(UnsupportedModelError, match="has an encoder"):
        selfspec.ablate(model, torch.tensor([[5, 6, 7, 8]]), drafts=["exits"], max_new_tokens=8)


def test_models_and_workloads_have_names() -> None:
    models = {name: tiny.llama(seed=seed) for seed, name in enumerate("ab")}
    prompts = {"one": tiny.prompt(4), "two": tiny.prompt(5)}
    both = selfspec.ablate(models, prompts, **{**_QUICK, "drafts": "exit:1"})
    assert len(both.drop_duplicates(["model", "workload"])) == 4
    alone = selfspec.ablate(models["b"], prompts["two"], **{**_QUICK, "drafts": "exit:1"})
    assert alone["model"].tolist() == ["LlamaForCausalLM"] * 2
    there = both[(both["model"] == "b") & (both["workload"] == "two")]
    assert there["alpha"].tolist() == alone["alpha"].tolist()


def test_progress_is_that_of_what_is_left(load: Load, tmp_path: Path) -> None:
    work_on(declared(drafts="exit:1", temperatures=[0.0]), load, Runs(tmp_path))
    watch, asked = Notes(1000), declared(drafts=["exit:1", "exit:2"], temperatures=[0.0], confirm=2)
    work_on(asked, load, Runs(tmp_path), watch)
    # Costs, texts and an exit were known, and take nothing of what is left: an exit on each text, and confirmations.
    texts = 3
    assert watch.expected == len(watch.steps) == texts * (1 + 2 * 4)
    assert list(dict.fromkeys(watch.steps)) in [
        ["exit:2", f"confirming {one}", f"confirming {two}"]
        for one, two in (("exit:1", "exit:2"), ("exit:2", "exit:1"))
    ]
