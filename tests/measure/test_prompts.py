"""Prompts from files, of one length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from helpers.saved_folders import checkpoint_folder as stories_folder
from helpers.tokenizers import PLAIN
from selfspec.errors import PromptError
from selfspec.measure.checkpoint import Checkpoint, load_checkpoint
from selfspec.measure.embedded import checkpoint_folder as demo_folder
from selfspec.measure.prompts import Text, Workload, built_in, check_context, parse_workloads, read_prompts
from selfspec.tools.lab.arms import prompt_writer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(demo_folder())
    return found


@pytest.fixture(scope="module")
def stories_tokenizer() -> PreTrainedTokenizerBase:
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
    assert [text.text for text in found.texts] == ["one and one", "and two", "a tale", "two and two"]
    assert not any(text.whole for text in found.texts)
    # A later turn knows what was asked before.
    assert [text.messages for text in found.texts] == [(), ({"role": "user", "content": "one and one"},), (), ()]
    # Only lines that say so, and one for each value.
    (found,) = parse_workloads(f"sums={questions}#category=maths")
    assert [text.text for text in found.texts] == ["one and one", "and two", "two and two"]
    lines = questions.read_text().splitlines()
    questions.write_text("\n".join(lines[:3]) + "\n")
    every = parse_workloads(f"q={questions}#category")
    assert [(each.name, len(each.texts)) for each in every] == [("q/maths", 3), ("q/prose", 1)]


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
    # Short texts have others before them.
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


CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And you?"},
    {"role": "assistant", "content": "Well."},
]


def test_every_turn_of_a_conversation_is_a_prompt_with_all_before_it(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": CONVERSATION, "reference": ["a list", "of two"]}))
    texts = read_prompts(file).texts
    assert [text.text for text in texts] == ["Hello?", "And you?"]
    assert [list(text.messages) for text in texts] == [CONVERSATION[:1], CONVERSATION[:3]]
    assert parse_workloads(f"c={file}")[0].texts == texts


@pytest.fixture(scope="module")
def chatty() -> Checkpoint:
    checkpoint = load_checkpoint(str(stories_folder()), "float32", "cpu")
    checkpoint.tokenizer.chat_template = PLAIN
    return checkpoint


def test_as_chats_the_model_answers_what_nobody_answered(chatty: Checkpoint) -> None:
    asked, more = "One day a dog", "What then?"
    workload = Workload("w", (Text(asked), Text(more, messages=({"role": "user", "content": asked},))))
    first, second = workload.whole_prompts(prompt_writer(chatty, True, 6))
    said = chatty.tokenizer.decode(first[0])
    assert said.endswith(f"user: {asked}\nassistant:")
    own = chatty.model.generate(first, attention_mask=torch.ones_like(first), max_new_tokens=6, do_sample=False)
    answer = chatty.tokenizer.decode(own[0, first.shape[1] :], skip_special_tokens=True)
    expected = f"user: {asked}\nassistant: {answer}\nuser: {more}\nassistant:"
    assert second[0].tolist() == chatty.tokenizer(expected, add_special_tokens=False).input_ids
    # An answer that is there stays.
    messages = ({"role": "user", "content": asked}, {"role": "assistant", "content": "It ran."})
    (third,) = Workload("w", (Text(more, messages=messages),)).whole_prompts(prompt_writer(chatty, True, 6))
    assert "assistant: It ran.\nuser: What then?" in chatty.tokenizer.decode(third[0])
    # As text a later turn stands behind those before it.
    (found,) = Workload("w", (Text("b", messages=({"role": "user", "content": "a"},)),)).whole_prompts(
        prompt_writer(chatty, False, 6)
    )
    assert found[0].tolist() == chatty.tokenizer("a\n\nb").input_ids


def test_prompts_that_leave_no_room_are_refused(chatty: Checkpoint) -> None:
    check_context(chatty.model, [torch.ones(1, 500)], 12)
    with pytest.raises(PromptError, match="exceed the model's context of 512"):
        check_context(chatty.model, [torch.ones(1, 500)], 13)
