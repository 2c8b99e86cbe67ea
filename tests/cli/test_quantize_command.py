"""`selfspec quantize`: a file that `--draft int8:FILE` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.running import Invoke


@pytest.mark.parametrize("bits", ["8", "4"])
def test_what_it_writes_drafts(invoke: Invoke, folder: str, tmp_path: Path, bits: str) -> None:
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


def test_json(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "made.safetensors"
    found = json.loads(invoke("quantize", folder, "--to", str(file), "--output", "json").stdout)
    assert found.pop("seconds") > 0
    assert "selfspec" in found.pop("versions")
    assert 0.2 < found.pop("share") < 0.3
    assert found == {"schema_version": 1, "file": str(file), "bytes": file.stat().st_size, "bits": 8, "format": "int8"}


def test_bad_input_is_refused_before_weights_are_read(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    for words, status, said in (
        (("--bits", "3", "--to", str(tmp_path / "x")), 2, "kernels for 8 and 4 bits"),
        (("--bits", "4", "--group-size", "48", "--to", str(tmp_path / "x")), 2, "group_size"),
        (("--to", str(tmp_path)), 1, "is a folder"),
        (("--texts", "3", "--to", str(tmp_path / "x")), 2, "serve 4 bits"),
        (("--bits", "4", "--prompt-file", str(tmp_path / "none"), "--to", str(tmp_path / "x")), 2, "cannot be read"),
    ):
        ending = invoke("quantize", folder, *words)
        assert ending.status == status
        assert said in ending.stderr
