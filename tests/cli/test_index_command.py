"""`selfspec index`: a corpus that `--draft suffix:FILE` looks in."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from helpers.running import Invoke

TEXT = "Once upon a time, there was a little girl named Lily.\n"


def test_what_it_writes_drafts(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    text, file = tmp_path / "text.jsonl.gz", tmp_path / "corpus"
    text.write_bytes(gzip.compress(json.dumps({"text": TEXT}).encode()))
    ending = invoke("index", folder, "--text", str(text), "--to", str(file))
    assert ending.status == 0, ending.stderr
    assert f"--draft suffix:{file}" in ending.stdout
    words = ("generate", folder, "--prompt", "Once", "--max-new-tokens", "12", "--draft")
    drafted = invoke(*words, f"suffix:{file}")
    assert drafted.status == 0, drafted.stderr
    assert drafted.stdout == invoke(*words, "none").stdout


def test_json_counts_the_tokens_of_all_texts(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    words = ("index", folder, "--to", str(tmp_path / "corpus"), "--output", "json", "--text", str(tmp_path / "a.txt"))
    once = json.loads(invoke(*words).stdout)
    twice = json.loads(invoke(*words, "--text", str(tmp_path / "a.txt")).stdout)
    assert twice["tokens"] == 2 * once["tokens"] > 0
    assert once["bytes"] == (tmp_path / "corpus").stat().st_size - (twice["bytes"] - once["bytes"])


def test_bad_input_is_refused_before_weights_are_read(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "text.txt").write_text(TEXT)
    for text, to, status, said in (
        ("missing.txt", "x", 2, "cannot be read"),
        ("empty.txt", "x", 2, "holds no text"),
        ("text.txt", ".", 1, "is a folder"),
    ):
        ending = invoke("index", folder, "--text", str(tmp_path / text), "--to", str(tmp_path / to))
        assert said in ending.stderr
        assert ending.status == status
    ending = invoke("generate", folder, "--prompt", "Once", "--draft", f"suffix:{tmp_path / 'missing'}")
    assert ending.status == 2
    assert "cannot be read as a corpus" in ending.stderr
