"""What trainings learn: text that is read and packed, the LayerSkip recipe by its paper, averages with the base."""

from __future__ import annotations

import gzip
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from helpers import tiny
from helpers.saved_folders import checkpoint_folder
from helpers.tokenizers import PLAIN
from selfspec.errors import CorpusError, TrainingError
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.stock import until_end
from selfspec.tools.train import corpus
from selfspec.tools.train.layerskip import average
from selfspec.tools.train.recipe import Averaging, Course, LayerSkipRecipe, Texts


def _jsonl(*texts: str) -> bytes:
    return "\n".join(json.dumps({"text": text}) for text in texts).encode() + b"\n"


def test_jsonl_gzip_and_plain_text_are_read(tmp_path: Path) -> None:
    for name, content in (
        ("a.jsonl", _jsonl("one", "two")),
        ("b.jsonl.gz", gzip.compress(_jsonl("one", "two"))),
        ("c.txt", b"one\ntwo"),
        ("d.txt.gz", gzip.compress(b"one\ntwo")),
    ):
        (tmp_path / name).write_bytes(content)
    assert (
        corpus.read_documents(tmp_path / "a.jsonl") == corpus.read_documents(tmp_path / "b.jsonl.gz") == ["one", "two"]
    )
    assert corpus.read_documents(tmp_path / "c.txt") == corpus.read_documents(tmp_path / "d.txt.gz") == ["one\ntwo"]
    # Other separators of lines stay inside a document.
    text = "one\u2028two\x85three"
    (tmp_path / "e.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert corpus.read_documents(tmp_path / "e.jsonl") == [text]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("truncated.gz", gzip.compress(b"some text that is long enough to cut" * 20, mtime=0)[:-20]),
        ("no_gzip.gz", b"plain"),
        ("damaged.gz", gzip.compress(b"text" * 500, mtime=0)[:14] + b"\xff" * 20),
        ("latin.txt", b"caf\xe9"),
        ("empty.txt", b" \n"),
        ("broken.jsonl", b'{"text": "one"}\n{"text": "tw'),
        ("foreign.jsonl", b'{"content": "one"}\n'),
        ("list.jsonl", b"[1]\n"),
    ],
)
def test_unreadable_text_is_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=name.split(".")[0]):
        corpus.read_documents(tmp_path / name)


def test_what_cannot_be_learnt_from_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(CorpusError, match=r"nowhere\.txt"):
        corpus.read_documents(tmp_path / "nowhere.txt")
    with pytest.raises(CorpusError, match="too few"):
        corpus.packed(["Once"], tokenizer, 100)
    with pytest.raises(CorpusError, match="no chat template"):
        list(corpus.encoded([corpus.Conversation(MESSAGES)], tokenizer))


def test_documents_are_packed_without_gaps_each_behind_its_mark(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ["Once upon a time", "there was a dog"]
    parts = [[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids] for text in texts]
    stream = parts[0] + parts[1]
    blocks = corpus.packed(texts, tokenizer, 4)
    assert blocks.ids.flatten().tolist() == stream[: len(stream) // 4 * 4]
    assert blocks.learnt.all()
    assert corpus.packed(texts, tokenizer, 4, most=1).ids.tolist() == [stream[:4]]
    # A text that begins with the mark itself, as chats do that were written down, gets no second one.
    assert corpus.packed([f"{tokenizer.bos_token}Once upon a time"], tokenizer, 1).ids.flatten().tolist() == parts[0]


def test_held_out_blocks_are_not_learnt_from() -> None:
    both = corpus.split(corpus.Blocks.of(torch.arange(60).view(30, 2)), 3)
    assert both.held_out.ids.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert both.train.ids.flatten().tolist() == list(range(6, 60))
    # Of a short text, a tenth.
    assert len(corpus.split(corpus.Blocks.of(torch.zeros(20, 2)), 3).held_out) == 2
    with pytest.raises(CorpusError, match="single block"):
        corpus.split(corpus.Blocks.of(torch.zeros(1, 2)), 3)
    nothing = corpus.Blocks(torch.zeros(20, 2), torch.zeros(20, 2, dtype=torch.bool))
    with pytest.raises(CorpusError, match="no answer"):
        corpus.split(nothing, 3)
    # Some blocks are taken from all over.
    assert corpus.spread(corpus.Blocks.of(torch.arange(10).view(10, 1)), 3).ids.flatten().tolist() == [0, 3, 6]
    assert len(corpus.spread(corpus.Blocks.of(torch.arange(2).view(2, 1)), 3)) == 2


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    documents = [str(number) for number in range(50)]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, half in zip(files, (documents[:25], documents[25:]), strict=True):
        file.write_bytes(_jsonl(*half))
    assert corpus.all_documents(files, 1) == corpus.all_documents(files, 1) != corpus.all_documents(files, 2)
    assert sorted(map(corpus.plain_text, corpus.all_documents(files, 1))) == sorted(documents)


MESSAGES = (
    {"role": "user", "content": "One day a dog"},
    {"role": "assistant", "content": "ran home."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "It sat."},
)


@pytest.fixture
def chatty() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint_folder())
    found.chat_template = PLAIN.replace("{{ message.content }}", "{{ message.content }}</s>")
    return found


def test_of_conversations_the_answers_are_learnt(tmp_path: Path, chatty: PreTrainedTokenizerBase) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n" + json.dumps({"text": "a tale"}))
    said, text = corpus.read_documents(tmp_path / "chats.jsonl")
    assert corpus.plain_text(said) == "One day a dog\n\nran home.\n\nAnd then?\n\nIt sat."
    (ids, learnt), (_, whole) = corpus.encoded([said, text], chatty)
    assert all(whole)
    parts, places = [], [at for at in range(len(ids)) if learnt[at]]
    for at in places:
        if at - 1 not in places:
            parts.append([ids[at]])
        else:
            parts[-1].append(ids[at])
    # The token that ends an answer is learnt, what the template writes behind it is not.
    assert [chatty.decode(part).strip() for part in parts] == ["ran home.</s>", "It sat.</s>"]
    assert ids.count(chatty.bos_token_id) == 0


def test_beginnings_are_those_of_documents(chatty: PreTrainedTokenizerBase) -> None:
    texts = ["Once upon a time there was a dog", "Tom had a big red ball and", "a"]
    own = [[chatty.bos_token_id, *chatty(text, add_special_tokens=False).input_ids][:4] for text in texts[:2]]
    # Those that are too short are left out, and where there are too few they come again.
    assert corpus.beginnings(texts, chatty, 3, 4, 32) == [*own, own[0]]
    found = corpus.beginnings([corpus.Conversation(MESSAGES)], chatty, 2, 4, 128)
    assert chatty.decode(found[0]).endswith("user: One day a dog</s> \nassistant:")
    assert chatty.decode(found[1]).endswith("user: And then?</s> \nassistant:")
    # A question that nobody has answered is one as well.
    asked = corpus.beginnings([corpus.Conversation(MESSAGES[:-1])], chatty, 2, 4, 128)
    assert asked == found
    assert chatty.decode(corpus.beginnings([corpus.Conversation(MESSAGES[:1])], chatty, 1, 4, 128)[0]).endswith(
        "assistant:"
    )
    with pytest.raises(CorpusError, match="no text has 400 tokens"):
        corpus.beginnings(texts, chatty, 3, 400, 512)


def test_beginnings_of_any_length_are_written_on_and_what_is_written_is_learnt(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = load_checkpoint(str(checkpoint_folder()), "float32", "cpu").model
    begun = [[1, 40, 50, 60, 70, 80], [1, 40], [1, 90, 30, 20]]
    found = corpus.written_text(model, begun, Course(length=16), Texts(text=[], held_out_blocks=1), tmp_path / "kept")
    rows = torch.cat([found.held_out.ids, found.train.ids]).tolist()
    learnt = torch.cat([found.held_out.learnt, found.train.learnt]).tolist()
    for first, row, which in zip(begun, rows, learnt, strict=True):
        assert row[: len(first)] == first
        # The longest of a batch says how much is written; nothing is learnt behind the end of a text.
        own = until_end(row[len(first) : len(first) + 16 - 6], {2})
        assert which == [False] * len(first) + [True] * len(own) + [False] * (16 - len(first) - len(own))


FOLDER = checkpoint_folder()


@pytest.fixture
def trained(tmp_path: Path) -> str:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(FOLDER)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    folder = tmp_path / "trained"
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((FOLDER / name).read_bytes())
    return str(folder)


def _averaging(held_out: Path | None = None) -> Averaging:
    return Averaging(base_share=0.25, held_out=held_out, held_out_blocks=2, length=16)


def test_every_weight_lies_between(trained: str, tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time there was a dog who liked to play with a big red ball in the park. " * 10)
    to = tmp_path / "average"
    report = average(trained, str(FOLDER), _averaging(text), to)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (trained, FOLDER, to)]
    for one, other, between in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(between, 0.75 * one + 0.25 * other)
    assert report["after"]["held_out_loss"] < report["before"]["held_out_loss"]
    assert report["base"]["fingerprint"] != report["trained"]["fingerprint"]
    assert json.loads((to / "training.json").read_text()) == report
    with pytest.raises(TrainingError, match="finished training"):
        average(trained, str(FOLDER), _averaging(), to)
    # Without a text nothing is measured.
    report = average(trained, str(FOLDER), _averaging(), tmp_path / "unmeasured")
    assert report["before"] == report["after"] == {}


def test_another_architecture_or_shape_is_refused(trained: str, tmp_path: Path) -> None:
    for number, other in enumerate((tiny.llama(), tiny.qwen2())):
        folder = tmp_path / str(number)
        other.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((FOLDER / name).read_bytes())
        with pytest.raises(TrainingError, match="differ in shape"):
            average(trained, str(folder), _averaging(), tmp_path / "average")
    assert not (tmp_path / "average").exists()


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 2.0])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(TrainingError, match="between 0 and 1"):
        Averaging(base_share=share)


def test_dropout_rises_exponentially_from_none_to_all_of_it() -> None:
    rates = LayerSkipRecipe(dropout=0.2).dropout_rates(12, step=0, steps=100)
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0.2)
    # D(l) + 1 is a geometric series.
    ratios = [(after / 0.2 + 1) / (before / 0.2 + 1) for before, after in pairwise(rates)]
    assert ratios == pytest.approx([2 ** (1 / 11)] * 11)
    # It may rise over the training as well.
    recipe = LayerSkipRecipe(dropout=0.2, dropout_curriculum="exponential")
    last = [recipe.dropout_rates(4, step, 101)[-1] for step in (0, 50, 100)]
    assert last == pytest.approx([0, 0.2 * (math.sqrt(2) - 1), 0.2])


def test_rotation_teaches_every_exit_equally_often() -> None:
    recipe = LayerSkipRecipe(rotation=3)
    steps = [recipe.active(10, step, 100) for step in range(3)]
    assert steps == [[1, 4, 7], [2, 5, 8], [3, 6, 9]]
    assert recipe.active(10, 3, 100) == steps[0]
    # A gradual curriculum adds exits from the last one, and has all at half time.
    recipe = LayerSkipRecipe(curriculum="gradual")
    found = [recipe.active(5, step, 80) for step in (0, 10, 20, 30, 79)]
    assert found == [[4], [3, 4], [2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]


def test_weights_are_the_papers() -> None:
    recipe = LayerSkipRecipe(exit_scale=0.2)
    # The paper's e(l) with l = E - 1: 0.2 * (0 + ... + l), and for the last layer l + 0.2 * (0 + ... + (l - 1)).
    expected = [0.2 * 1, 0.2 * 6, 5 + 0.2 * 10]
    assert recipe.weights(6, [2, 4]) == pytest.approx([weight / sum(expected) for weight in expected])
    assert LayerSkipRecipe(exit_scale=0.5, weighting="even").weights(12, [2, 4]) == pytest.approx([0.25, 0.25, 0.5])
    # No exit leaves the full model alone.
    assert LayerSkipRecipe(exits=(3,), rotation=2).active(6, 1, 10) == []
    assert LayerSkipRecipe().weights(6, []) == [1.0]


@pytest.mark.parametrize(
    "recipe",
    [
        LayerSkipRecipe(exits=(0,)),
        LayerSkipRecipe(exits=(4,)),
        LayerSkipRecipe(dropout=1.0),
        LayerSkipRecipe(dropout=-0.1),
        LayerSkipRecipe(rotation=0),
    ],
)
def test_recipes_out_of_range_are_refused(recipe: LayerSkipRecipe) -> None:
    with pytest.raises(TrainingError):
        recipe.exits_of(4)
