"""`selfspec quantize`, `selfspec index` and `selfspec export`: files that drafts and other engines read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from helpers.running import Invoke

TEXT = "Once upon a time, there was a little girl named Lily.\n"


@pytest.mark.parametrize("bits", ["8", "4"])
def test_weights_in_fewer_bits_draft(invoke: Invoke, folder: str, tmp_path: Path, bits: str) -> None:
    file = tmp_path / "made.safetensors"
    ending = invoke("quantize", folder, "--bits", bits, "--to", str(file), *(("--texts", "1") if bits == "4" else ()))
    assert (ending.status, ending.stderr) == (0, "")
    assert f"--draft int{bits}:{file}" in ending.stdout
    words = ("generate", folder, "--prompt", "Once", "--max-new-tokens", "12", "--stats", "--draft")
    drafted = invoke(*words, f"int{bits}:{file}", "--draft-length", "3")
    assert drafted.status == 0
    assert drafted.stdout == invoke(*words, "none").stdout
    assert "substitutes" in drafted.stderr


@pytest.mark.tools
def test_prompts_and_seeds_change_what_errors_are_compensated_on(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\nThe dog\n")
    ways = ((), (), ("--seed", "1"), ("--prompt-file", str(prompts)), ("--texts", "0"))
    written = []
    for number, words in enumerate(ways):
        file = tmp_path / str(number)
        assert invoke("quantize", folder, "--bits", "4", "--to", str(file), "--texts", "1", *words).status == 0
        written.append(file.read_bytes())
    assert written[0] == written[1]
    assert len(set(written)) == 4


def test_json_of_weights_in_fewer_bits(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "made.safetensors"
    found = json.loads(invoke("quantize", folder, "--to", str(file), "--output", "json").stdout)
    assert found.pop("seconds") > 0
    assert "selfspec" in found.pop("versions")
    assert 0.2 < found.pop("share") < 0.3
    assert found == {"schema_version": 1, "file": str(file), "bytes": file.stat().st_size, "bits": 8, "format": "int8"}


def test_a_corpus_drafts(invoke: Invoke, folder: str, tmp_path: Path) -> None:
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


def test_an_exported_checkpoint(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    to = tmp_path / "draft"
    ending = invoke("export", folder, "--draft", "exit:2", "--to", str(to))
    assert (ending.status, ending.stderr) == (0, "")
    assert f"{to}: exit:2, 2 layers" in ending.stdout
    assert "assistant_model" in ending.stdout
    assert AutoModelForCausalLM.from_pretrained(to).config.num_hidden_layers == 2
    again = invoke("export", folder, "--draft", "skip:layers=1", "--to", str(to))
    assert again.status == 1
    assert "--overwrite" in again.stderr
    over = invoke("export", folder, "--draft", "skip:layers=1", "--to", str(to), "--overwrite", "--output", "json")
    assert json.loads(over.stdout)["layers"] == [0, 2, 3, 4]


def test_an_exported_gguf_file(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    to = tmp_path / "draft.gguf"
    words = ("export", folder, "--format", "gguf", "--to", str(to), "--precision", "q8_0", "--draft")
    found = json.loads(invoke(*words, "exit:2", "--output", "json").stdout)
    assert to.stat().st_size == found["size"]
    assert to.read_bytes()[:4] == b"GGUF"
    assert json.loads(invoke(*words, "none", "--overwrite", "--output", "json").stdout)["share"] == 1
