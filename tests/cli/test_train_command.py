"""`selfspec train`, `quantize`, `index` and `export`: what is made, in one command each, drafts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from helpers.snippets import Invoke, Said

_QUICK = ("--steps", "3", "--batch", "2", "--length", "16", "--held-out-blocks", "2", "--device", "cpu")
# The measured check of a new checkpoint takes one turn.
_ONE_TURN = ("--check-seconds", "0")


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "story.txt"
    file.write_text("Once upon a time there was a dog who liked to play with a big red ball in the park. " * 20)
    return str(file)


@pytest.mark.tools
def test_layerskip_makes_a_checkpoint_that_drafts(invoke: Invoke, folder: str, text: str, tmp_path: Path) -> None:
    to = str(tmp_path / "model")
    words = f"train layerskip {folder} --text {text} --to {to} --exits 2,3 --output json".split()
    ending = invoke(*words, *_QUICK, *_ONE_TURN)
    assert ending.status == 0, ending.stderr
    report = json.loads(ending.stdout)
    assert report["recipe"]["exits"] == [2, 3]
    assert report["before"].keys() == report["after"].keys() >= {"held_out_loss", "agreement_2", "alpha_3", "speedup_3"}
    assert "step 3/3" in ending.stderr
    printed = [line for line in ending.stderr.splitlines() if line]
    assert len(set(printed)) == len(printed)
    assert [each["draft"] for each in report["checked"]] == ["exit:2", "exit:3"]
    assert all(each["greedy"]["value"] > 0 for each in report["checked"])
    drafted = invoke("generate", to, "--draft", "exit:2", "--prompt", "Once", "--max-new-tokens", "8")
    assert (drafted.status, drafted.stderr) == (0, "")


def test_a_checkpoint_is_averaged_with_its_base(invoke: Invoke, folder: str, text: str, tmp_path: Path) -> None:
    to = str(tmp_path / "average")
    ending = invoke("train", "average", folder, folder, "--to", to, "--held-out", text, "--length", "16")
    assert ending.status == 0, ending.stderr
    assert "full model" in ending.stdout
    drafted = invoke("generate", to, "--draft", "exit:2", "--prompt", "Once", "--max-new-tokens", "8")
    assert drafted.status == 0


def test_a_draft_head_drafts_for_its_base(invoke: Invoke, folder: str, text: str, tmp_path: Path) -> None:
    to = str(tmp_path / "eagle")
    ending = invoke("train", "head", folder, "--kind", "eagle3", "--text", text, "--to", to, "--depth", "2", *_QUICK)
    assert ending.status == 0, ending.stderr
    assert all(name in ending.stdout for name in ("token 1", "token 2", "accepted of a greedy draft"))
    words = ("generate", folder, "--prompt", "Once upon a time", "--max-new-tokens", "12")
    assert invoke(*words, "--draft", f"eagle:{to}").stdout == invoke(*words).stdout
    unknown = invoke("train", "head", folder, "--kind", "eagle9", "--text", text, "--to", to)
    assert (unknown.status, "eagle3" in unknown.stderr) == (2, True)


@pytest.mark.tools
def test_exit_heads_draft_for_their_base_alone(invoke: Invoke, folder: str, text: str, tmp_path: Path) -> None:
    to = str(tmp_path / "heads")
    ending = invoke(
        "train", "exit", folder, "--text", text, "--to", to, "--exits", "2,3", "--rank", "8", *_QUICK, *_ONE_TURN
    )
    assert ending.status == 0, ending.stderr
    assert "exit 2" in ending.stdout
    # Whether it pays is said, by measurement.
    assert "plain decoding" in ending.stdout
    words = ("generate", folder, "--prompt", "Once upon a time", "--max-new-tokens", "12")
    plain = invoke(*words).stdout
    assert invoke(*words, "--draft", f"head:{to}").stdout == plain
    assert invoke(*words, "--draft", f"head:{to}@2").stdout == plain


def test_a_vocabulary_is_counted_and_stays_exact(invoke: Invoke, folder: str, text: str, tmp_path: Path) -> None:
    file = str(tmp_path / "v.json")
    counted = invoke("train", "vocabulary", folder, "--text", text, "--to", file, "--size", "16", "--output", "json")
    assert json.loads(counted.stdout)["coverage"] == pytest.approx(0.6186, abs=1e-4)
    words = f"verify {folder} --draft exit:2+vocab:{file} --samples 100 --max-new-tokens 6 --output json"
    verified = invoke(*words.split())
    assert verified.status == 0, verified.stdout


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


def test_json_of_weights_in_fewer_bits(said: Said, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "made.safetensors"
    found = said("quantize", folder, "--to", str(file))
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


def test_an_exported_gguf_file(said: Said, folder: str, tmp_path: Path) -> None:
    to = tmp_path / "draft.gguf"
    words = ("export", folder, "--format", "gguf", "--to", str(to), "--precision", "q8_0", "--draft")
    found = said(*words, "exit:2")
    assert to.stat().st_size == found["size"]
    assert to.read_bytes()[:4] == b"GGUF"
    assert said(*words, "none", "--overwrite")["share"] == 1
