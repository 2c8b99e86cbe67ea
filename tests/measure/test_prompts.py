"""Prompts from files, of one length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from helpers.stories import checkpoint_folder as stories_folder
from selfspec.errors import PromptError
from selfspec.measure.embedded import checkpoint_folder as demo_folder
from selfspec.measure.prompts import Text, Workload, built_in, parse_workloads


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """One that begins texts with nothing."""
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(demo_folder())
    return found


@pytest.fixture(scope="module")
def stories_tokenizer() -> PreTrainedTokenizerBase:
    """One that begins texts with its bos token."""
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(stories_folder())
    return found


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Three questions of two sorts, and a line that is none."""
    file = tmp_path / "questions.jsonl"
    lines = [
        {"category": "maths", "turns": ["one and one", "and two"]},
        {"category": "prose", "prompt": "a tale"},
        {"category": "maths", "turns": ["two and two"]},
        {"category": "none"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    return file


def test_every_line_with_a_text(questions: Path) -> None:
    (found,) = parse_workloads(f"all={questions}")
    assert found.name == "all"
    assert [text.text for text in found.texts] == ["one and one", "a tale", "two and two"]
    assert not any(text.whole for text in found.texts)


def test_only_lines_that_say_so(questions: Path) -> None:
    (found,) = parse_workloads(f"sums={questions}#category=maths")
    assert [text.text for text in found.texts] == ["one and one", "two and two"]


def test_one_for_each_value(questions: Path) -> None:
    lines = questions.read_text().splitlines()
    questions.write_text("\n".join(lines[:3]) + "\n")
    found = parse_workloads(f"q={questions}#category")
    assert [(each.name, len(each.texts)) for each in found] == [("q/maths", 2), ("q/prose", 1)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("file.jsonl", "write NAME=FILE"),
        ("name=", "write NAME=FILE"),
        ("name=nowhere.jsonl", "cannot be read"),
        ("name={file}#category=none", "has any of prompt, turns, text"),
        ("name={file}#sort", "has a field 'sort'"),
    ],
)
def test_bad_input(questions: Path, given: str, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        parse_workloads(given.format(file=questions))


@pytest.mark.parametrize("content", ["no json\n", "[1]\n"])
def test_lines_that_are_no_objects(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(PromptError, match="line 1 of"):
        parse_workloads(f"name={tmp_path / 'bad.jsonl'}")


def test_documents_give_their_beginning_and_prompts_their_end(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "import os\n\ndef walk(path):\n    return path\n" * 3
    ids = tokenizer(text).input_ids
    for whole, expected in ((True, ids[:12]), (False, ids[-12:])):
        (prompts,) = Workload("w", (Text(text, whole),)).prompts(tokenizer, 1, 1, 12)
        assert prompts.tolist() == [expected]


def test_short_texts_have_others_before_them(tokenizer: PreTrainedTokenizerBase) -> None:
    first, second = (tokenizer(text).input_ids for text in ("import os", "def walk"))
    workload = Workload("w", (Text("import os", False), Text("def walk", False)))
    width = len(first) + len(second)
    found = workload.prompts(tokenizer, 2, 1, width)
    assert [each.tolist() for each in found] == [[second + first], [first + second]]


def test_every_prompt_begins_as_texts_of_the_model_do(stories_tokenizer: PreTrainedTokenizerBase) -> None:
    (prompts,) = Workload("w", (Text("Once upon a time there was a dog", False),)).prompts(stories_tokenizer, 1, 1, 6)
    assert prompts.shape == (1, 6)
    assert prompts[0, 0] == stories_tokenizer.bos_token_id
    assert (prompts[0, 1:] != stories_tokenizer.bos_token_id).all()


@pytest.mark.parametrize(("number", "batch", "shapes"), [(4, 1, [1] * 4), (4, 2, [2, 2]), (5, 2, [2, 2]), (1, 6, [6])])
def test_batches(tokenizer: PreTrainedTokenizerBase, number: int, batch: int, shapes: list[int]) -> None:
    found = built_in().prompts(tokenizer, number, batch, 10)
    assert [each.shape for each in found] == [(rows, 10) for rows in shapes]
