"""`selfspec.ablate(model, ...)`."""

from __future__ import annotations

from typing import Any

import pytest

import selfspec
from helpers import tiny
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


def test_an_architecture_that_cannot_be_judged_says_so_point_by_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from selfspec.measure.teacher_forced import passes

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
