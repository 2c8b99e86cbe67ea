"""`selfspec train`: from a checkpoint and a text file to something that drafts, in one command each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.running import Invoke

_QUICK = ("--steps", "3", "--batch", "2", "--length", "16", "--held-out-blocks", "2", "--device", "cpu")
# The measured check of a new checkpoint takes one turn.
_ONE_TURN = ("--check-seconds", "0")


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A little story."""
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
    again = invoke("train", "average", folder, folder, "--to", to)
    assert (again.status, "finished training" in again.stderr) == (2, True)


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

    again = invoke("train", "exit", folder, "--text", text, "--to", to, *_QUICK)
    assert again.status == 2
    assert "finished training" in again.stderr


def test_a_vocabulary_is_counted_and_stays_exact(invoke: Invoke, folder: str, text: str, tmp_path: Path) -> None:
    file = str(tmp_path / "v.json")
    counted = invoke("train", "vocabulary", folder, "--text", text, "--to", file, "--size", "16", "--output", "json")
    assert json.loads(counted.stdout)["coverage"] == pytest.approx(0.6186, abs=1e-4)
    words = f"verify {folder} --draft exit:2+vocab:{file} --samples 100 --max-new-tokens 6 --output json"
    verified = invoke(*words.split())
    assert verified.status == 0, verified.stdout
