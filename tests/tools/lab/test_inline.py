"""`selfspec.ablate(model, ...)`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import selfspec
from helpers import tiny
from helpers.shrunken import shrunken
from selfspec.accept import TokenLevel
from selfspec.draft import Budget, Draft, RowsView, Stateless
from selfspec.errors import StudyError

pandas = pytest.importorskip("pandas")
_QUICK: dict[str, Any] = {
    "drafts": ["exits", "sublayers"],
    "max_new_tokens": 8,
    "draft_lengths": [1, 2],
    "temperatures": [0],
    "confirm": 0,
    "pricing": "weights",
}


def test_a_model_in_memory_gives_a_table() -> None:
    model = tiny.llama()
    table = selfspec.ablate(model, tiny.prompt(4, batch=2), **_QUICK)
    assert isinstance(table, pandas.DataFrame)
    assert len(table) == (3 + 8) * 2
    assert table["alpha"].between(0, 1).all()
    assert set(table["kind"]) == {"exit", "skip"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"texts": 3}, "follows from the model"),
        ({"draft": "exits"}, "did you mean 'drafts'"),
        ({"drafts": ["exit:7"]}, "out of range"),
        ({"prompts": ["a text"]}, "tokenizer"),
        ({"prompts": tiny.prompt(4)[0]}, "not \\[texts, tokens\\]"),
    ],
)
def test_what_cannot_be_is_said(changes: dict[str, Any], said: str) -> None:
    given = {"prompts": tiny.prompt(4), **_QUICK, **changes}
    with pytest.raises(StudyError, match=said):
        selfspec.ablate(tiny.llama(), given.pop("prompts"), **given)


@dataclass(frozen=True)
class Same(Stateless):
    """A drafter that no name says all of: the same tokens again and again."""

    tokens: tuple[int, ...]

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return Draft.chain(torch.tensor([self.tokens[: budget.depth]] * len(rows.running)))


class Willing(TokenLevel):
    """A rule that no name says."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_drafters_and_rules_are_objects_too() -> None:
    model, own, rule = tiny.llama(), Same((1, 2)), Willing("mine")
    quick = {**_QUICK, "drafts": [own, "exit:1"], "accept": rule, "confirm": 2}
    table = selfspec.ablate(model, tiny.prompt(4, batch=2), **quick)
    assert dict(zip(table["draft"], table["judged_by"], strict=True)) == {
        "exit:1": "teacher forcing",
        repr(own): "generation",
    }
    assert table["exact"].dropna().all()
    found = selfspec.bench(model, [tiny.prompt(4)], [own, "exit:1"], accept=[rule], timed=False, temperatures=[0])
    assert list(found["draft"]) == [repr(own), "exit:1"]
    assert set(found["accept"]) == {repr(rule)}
    assert (found["mean_accepted_length_value"] >= 1).all()


@pytest.mark.tools
def test_a_bench_in_memory_gives_a_table_and_a_report(tmp_path: Path) -> None:
    model = tiny.llama()
    quick: dict[str, Any] = {"temperatures": [0], "max_new_tokens": 16, "repeats": 2, "warm_up": 1}
    table = selfspec.bench(model, tiny.prompt(4, batch=2), [Same((1,)), "exit:2"], to=tmp_path, **quick)
    assert list(table["name"]) == ["model.generate", "selfspec plain", f"selfspec {Same((1,))}", "selfspec exit:2"]
    assert (table["decoding_tokens_per_second_value"] > 0).all()
    assert "doubts" in table.attrs
    texts = pandas.read_parquet(tmp_path / "texts.parquet")
    assert len(texts) == 4 * 2 * 2
    assert (tmp_path / "report.html").exists()


def test_an_architecture_that_cannot_be_judged_says_so_point_by_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from selfspec.measure import teacher_forced as passes

    monkeypatch.setattr(passes, "_ROUNDING", dict.fromkeys(passes._ROUNDING, -1.0))
    table = selfspec.ablate(tiny.llama(), tiny.prompt(4), **_QUICK)
    assert table["error"].str.contains("measure it by generation").all()


def test_texts_are_whole_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt is read to its end, however short the others are."""
    from selfspec.measure import own_text

    read: list[list[int]] = []
    continued = own_text.own_text

    def noted(model: Any, prompts: Any, *rest: Any) -> Any:
        read.append(prompts[0].tolist())
        return continued(model, prompts, *rest)

    class Letters:
        def __call__(self, text: str, return_tensors: str) -> Any:
            from types import SimpleNamespace

            import torch

            return SimpleNamespace(input_ids=torch.tensor([[ord(letter) - 96 for letter in text]]))

        def decode(self, ids: list[int]) -> str:
            return "".join(chr(token + 96) for token in ids)

    monkeypatch.setattr(own_text, "own_text", noted)
    selfspec.ablate(tiny.llama(), ["ab", "abcdef"], tokenizer=Letters(), **{**_QUICK, "drafts": "exit:1"})
    assert read == [[1, 2], [1, 2, 3, 4, 5, 6]]


def test_models_whose_layers_keep_states_are_judged_by_generation() -> None:
    prompts = torch.randint(5, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    table = selfspec.ablate(shrunken("lfm2"), prompts, **{**_QUICK, "drafts": "exits"})
    assert set(table["judged_by"]) == {"generation"}
    assert table["alpha"].between(0, 1).all()
