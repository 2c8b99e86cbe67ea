"""A whole study: all that was to be found out is, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.studies import counted, declared, stories_loader
from selfspec.errors import StudyError
from selfspec.measure.expected_time import TokenTimes
from selfspec.tools.lab import ablation
from selfspec.tools.lab.ablation import Finding, fit_study, resize, sizes_of, work, work_on
from selfspec.tools.lab.estimates import count, estimate, estimate_asked
from selfspec.tools.lab.runs import Asked, Run, Runs
from selfspec.tools.lab.study import StudiedModel, texts_asked, texts_of, write_texts

pytest.importorskip("pandas")

Load = Callable[[str], StudiedModel]


@pytest.fixture(scope="module")
def load() -> Load:
    return stories_loader()


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each thing was really done."""
    counted: Counter[str] = Counter()
    find_out = Runs.find_out

    def counting(runs: Runs, asked: Sequence[Asked], find: Any, environment: Mapping[str, Any]) -> None:
        def noted(some: Sequence[Asked]) -> Any:
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
    assert work_on(declared(), load, Runs(tmp_path)).table == first.table
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
        free = _texts(work_on(asked, lambda name: own, Runs(None)), studied)
        studied.model.generation_config.eos_token_id = free[0][1][2]
        ended = work_on(asked, lambda name: own, Runs(None))
    finally:
        studied.model.generation_config.eos_token_id = before
    texts = _texts(ended, studied)
    assert [prompt for prompt, _ in texts] == [prompt[0].tolist() for prompt in prompts]
    for (_, whole), (_, text) in zip(free, texts, strict=True):
        assert text == whole[: len(text)]
        assert len(text) == len(whole) or text[-1] == free[0][1][2]
    assert len(texts[0][1]) <= 3
    (row,) = [row for row in ended.table if row.get("measured_acceptance_rate") is not None]
    # Greedily the estimate is the generation itself, whatever ends its texts.
    assert row["exact"] is True
    assert row["measured_acceptance_rate"] == pytest.approx(row["acceptance_rate"])
    assert row["measured_tokens_by_text"] == [len(text) for _, text in texts]


def _texts(finding: Finding, studied: StudiedModel) -> list[tuple[list[int], list[int]]]:
    written = next(run for run in finding.runs if run.asked.kind == "texts")
    found = [(text.ids[0].tolist(), text.prompt) for text in texts_of(written, studied.model.device)]
    return [(ids[:prompt], ids[prompt:]) for ids, prompt in found]


def test_what_goes_wrong_with_a_draft_is_its_result(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(studied: StudiedModel, texts: Any, temperature: float, asked: Sequence[Asked]) -> list[dict[str, Any]]:
        if any(each.under["draft"] == "exit:3" for each in asked):
            raise ZeroDivisionError("of all things")
        return estimate(studied, texts, temperature, asked)

    monkeypatch.setattr(ablation, "estimate", fails)
    finding = work_on(declared(drafts=["exits"], temperatures=[0.0]), load, Runs(None))
    (failed,) = finding.failed
    assert failed.asked.under["draft"] == "exit:3"
    assert failed.error is not None
    assert failed.error.startswith("ZeroDivisionError: of all things (test_ablation.py:")
    assert {row["draft"] for row in finding.table if row.get("error") is None} == {"exit:1", "exit:2", "exit:4"}


def test_an_interrupt_keeps_what_was_finished(load: Load, tmp_path: Path, done: Counter[str]) -> None:
    def interrupt(count: int, known: int, share: float) -> None:
        assert 0 <= share <= 1
        if count >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work_on(declared(), load, Runs(tmp_path), interrupt)
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
    rows = {row["draft"]: row for row in finding.table}
    assert [rows[name]["judged_by"] for name in drafts] == ["teacher forcing", *["generation"] * 3]
    assert (rows["lookup"]["c"], rows["lookup"]["kind"]) == (0.0, "lookup")
    assert rows["lookup"]["drafting_share"] < 1
    assert 0 < rows["int8"]["c"] < 1
    assert rows["lookup+exit:3"]["c"] == rows["exit:3"]["c"]
    for row in rows.values():
        assert len(row["tokens_by_text"]) == len(row["rounds_by_text"]) == 3
        assert sum(row["tokens_by_text"]) / sum(row["rounds_by_text"]) == pytest.approx(row["mean_accepted_length"])


def test_greedily_generation_counts_what_teacher_forcing_says(load: Load) -> None:
    studied, study = load("stories"), declared(temperatures=[0.0])
    asked = texts_asked(studied, "given", 0.0, study)
    written = Run(asked, write_texts(studied, asked))
    texts = texts_of(written, studied.model.device)
    forced, counted = (estimate_asked("exit:3", "", asked, study, by_generation) for by_generation in (False, True))
    (said,) = estimate(studied, texts, 0.0, [forced])
    found = count(studied, texts, 0.0, study.max_new_tokens, counted)
    for length, expected in said["lengths"].items():
        for name in ("judged", "accepted", "tokens_by_text", "rounds_by_text"):
            assert found["lengths"][length][name] == pytest.approx(expected[name])


TIMES = TokenTimes(step=11, read=1)


@pytest.mark.tools
@pytest.mark.parametrize(("confirm", "pricing"), [(0, "weights"), (2, "weights"), (0, "measured")])
def test_it_is_of_the_right_size(confirm: int, pricing: str) -> None:
    load = stories_loader()
    study = declared(drafts=["exits"], confirm=confirm, pricing=pricing, max_new_tokens=24)
    with counted(load("stories").model) as found:
        work_on(study, load, Runs(None))
    expected = TIMES.seconds(work(study, load("stories"), 4, {}))
    assert 0.4 < expected / found.seconds < 2.5


def test_a_study_goes_on_with_the_sizes_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    studied, study = stories_loader()("stories"), declared(max_new_tokens=64, confirm=6, reach=2)

    def fitted(seconds: float, place: Path | None = tmp_path, minutes: float = 1) -> dict[str, int]:
        monkeypatch.setattr(TokenTimes, "measured", lambda model: TokenTimes(seconds, seconds))
        return dict(fit_study(study, sizes_of(study), 14, studied, minutes, Runs(place)).sizes)

    begun = fitted(1.0)
    assert begun["max_new_tokens"] == 16
    assert fitted(1e-6) == begun
    assert fitted(1e-6, None) == {"max_new_tokens": 64, "confirm": 6, "reach": 2}
    assert resize(study, begun).max_new_tokens == 16
    # With more texts it goes on from what is known; with more time it is another.
    study = replace(study, texts=9)
    assert fitted(1e-6) == begun
    assert fitted(1e-6, minutes=2)["max_new_tokens"] == 64
