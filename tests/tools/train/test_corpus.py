"""Reading and packing text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from helpers.stories import checkpoint_folder
from selfspec.errors import CorpusError
from selfspec.tools.train.corpus import all_documents, packed, read_documents, split, spread


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint_folder())
    return found


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
    assert read_documents(tmp_path / "a.jsonl") == read_documents(tmp_path / "b.jsonl.gz") == ["one", "two"]
    assert read_documents(tmp_path / "c.txt") == read_documents(tmp_path / "d.txt.gz") == ["one\ntwo"]


def test_other_line_separators_stay_inside_a_document(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_documents(tmp_path / "a.jsonl") == [text]


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
        read_documents(tmp_path / name)


def test_missing_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"nowhere\.txt"):
        read_documents(tmp_path / "nowhere.txt")


def test_documents_are_packed_without_gaps_each_behind_its_mark(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ["Once upon a time", "there was a dog"]
    parts = [[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids] for text in texts]
    stream = parts[0] + parts[1]
    blocks = packed(texts, tokenizer, 4)
    assert blocks.flatten().tolist() == stream[: len(stream) // 4 * 4]
    assert packed(texts, tokenizer, 4, most=1).tolist() == [stream[:4]]


def test_too_little_text_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(CorpusError, match="too few"):
        packed(["Once"], tokenizer, 100)


def test_held_out_blocks_are_not_learnt_from() -> None:
    both = split(torch.arange(60).view(30, 2), 3)
    assert both.held_out.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert both.train.flatten().tolist() == list(range(6, 60))
    # Of a short text, a tenth.
    assert len(split(torch.zeros(20, 2), 3).held_out) == 2
    with pytest.raises(CorpusError):
        split(torch.zeros(1, 2), 3)


def test_spread_takes_from_all_over() -> None:
    assert spread(torch.arange(10).view(10, 1), 3).flatten().tolist() == [0, 3, 6]
    assert len(spread(torch.arange(2).view(2, 1), 3)) == 2


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    documents = [str(number) for number in range(50)]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, half in zip(files, (documents[:25], documents[25:]), strict=True):
        file.write_bytes(_jsonl(*half))
    assert all_documents(files, 1) == all_documents(files, 1) != all_documents(files, 2)
    assert sorted(all_documents(files, 1)) == sorted(documents)
