"""Study files: what they may say, and what is said of what they may not."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from helpers import tiny
from selfspec.draft import Budget, Draft, RowsView, Stateless
from selfspec.errors import StudyError
from selfspec.model.registry import find_adapter
from selfspec.tools.lab.drafts import Given, content, draft_kind, named_drafts, skip_set
from selfspec.tools.lab.study import Study, read_study


@dataclass(frozen=True)
class Guess(Stateless):
    """A drafter that no name says all of."""

    tokens: tuple[int, ...]
    file: str = ""

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return rows.no_draft()


def test_a_file_declares_a_study(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('models = "demo"\ntemperatures = [0, 0.8]\ntexts = 4\n')
    one = read_study(tmp_path / "a.toml")
    assert one == Study(("demo",), temperatures=(0.0, 0.8), texts=4, name="a")
    assert Study.of(asdict(one)) == one
    assert read_study(tmp_path / "a.toml", {"texts": 2}).texts == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models = [", "is not TOML"),
        ("", "names no models"),
        ('models = "demo"\ndraft = "exits"', "did you mean 'drafts'"),
        ('models = "demo"\nzzz = 1', "known are models"),
        ('models = "demo"\ntexts = "many"', "texts: Input should be a valid integer"),
        ('models = "demo"\ntexts = 0', "texts: Input should be greater than or equal to 1"),
        ('models = "demo"\ntemperatures = ["hot"]', "temperatures.0: Input should be a valid number"),
        ('models = "demo"\ntemperatures = [-1]', "temperatures.0: Input should be greater"),
        ('models = "demo"\ndraft_lengths = []', "draft_lengths: this is empty"),
        ('models = "demo"\ndraft_lengths = [0]', "draft_lengths.0: Input should be greater"),
        ('models = "demo"\ndraft_lengths = [1, 1]', "draft_lengths: this names something twice"),
        ('models = "demo"\nseed = true', "seed: Input should be a valid integer"),
        ('models = "demo"\ntemperatures = [nan]', "temperatures.0: Input should be"),
        ('models = "demo"\ntemperatures = [true]', "temperatures.0: Input should be"),
        ('models = "demo"\nseed = 9223372036854775808', "seed: Input should be less"),
        ('models = "demo"\nreach = 0', "reach: Input should be greater"),
        ('models = "demo"\npricing = "guess"', "pricing: Input should be 'measured' or 'weights'"),
        ('models = "demo"\ndtype = "int3"', "dtype: Input should be 'auto'"),
    ],
)
def test_what_is_malformed_is_said(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(StudyError, match=said):
        read_study(tmp_path / "a.toml")


def test_a_study_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="cannot be read"):
        read_study(tmp_path / "none.toml")


def _names(*names: str) -> list[str]:
    model = tiny.llama()
    return list(named_drafts(names, model, find_adapter(model), seed=0))


def test_drafts_are_named_one_by_one() -> None:
    assert _names("exits") == ["exit:1", "exit:2", "exit:3"]
    assert _names("layers", "skip:layers=2") == [f"skip:layers={layer}" for layer in range(4)]
    assert len(_names("sublayers")) == 8
    drawn = _names("random:3x10")
    assert len(set(drawn)) == 10
    assert {len(skip_set(name)) for name in drawn} == {3}
    assert drawn == _names("random:3x10")
    # There are no more than 8 of one sublayer.
    assert len(_names("random:1x50")) == 8


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


def test_a_name_that_is_no_skip_set() -> None:
    with pytest.raises(StudyError, match="no skip set"):
        skip_set("exit:2")


def test_kinds_are_drafts_without_arguments() -> None:
    kinds = {name: draft_kind(name) for name in ("exit:3", "lookup+int8", "int4+exit:2", "exit:2+vocab:a+b.json")}
    assert list(kinds.values()) == ["exit", "lookup+int8", "int4+exit", "exit+vocab"]
    assert draft_kind("bigrams:Bigram:2+exit:4") == "bigrams:Bigram+exit"


def test_drafts_that_are_objects_are_known_by_their_names() -> None:
    model, own = tiny.llama(), Guess((1, 2))
    given = Given.of([own, "exit:1"])
    found = named_drafts([repr(own), "exit:1"], model, find_adapter(model), 0, given)
    assert given.drafter(repr(own)) is own
    assert found.keys() == {repr(own), "exit:1"}
    # Other fields are another draft.
    assert content(own) == content(Guess((1, 2))) != content(Guess((1, 3)))


def test_a_draft_whose_file_changes_is_another(tmp_path: Path) -> None:
    file = tmp_path / "table"
    file.write_text("a")
    before = content(Guess((), str(file)))
    file.write_text("ab")
    assert content(Guess((), str(file))) != before
