"""The entry of the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import selfspec
from helpers.running import Invoke


def test_version(invoke: Invoke) -> None:
    ending = invoke("--version")
    assert (ending.status, ending.stdout) == (0, f"selfspec {selfspec.__version__}\n")


@pytest.mark.parametrize("words", [[], ["generate"], ["inspect"], ["demo"], ["bench"]])
def test_every_command_has_help(invoke: Invoke, words: list[str]) -> None:
    ending = invoke(*words, "--help")
    assert (ending.status, ending.stderr) == (0, "")
    assert "Usage: selfspec" in ending.stdout


def test_an_unknown_command(invoke: Invoke) -> None:
    ending = invoke("generat")
    assert ending.status == 2
    assert "error: No such command 'generat'. Did you mean 'generate'?" in ending.stderr


def test_without_words_it_helps(invoke: Invoke) -> None:
    ending = invoke()
    assert ending.status == 2
    assert "error" not in ending.stderr


def test_a_mistake_of_ours_is_shown_with_its_place(
    invoke: Invoke, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("slip")

    monkeypatch.setattr("selfspec.model.summary.describe", broken)
    ending = invoke("inspect", folder, "--output", "json")
    assert ending.status == 1
    assert json.loads(ending.stdout)["error"] == {"type": "RuntimeError", "message": "RuntimeError: slip"}
    assert "Traceback" in ending.stderr


def test_help_waits_for_no_heavy_import() -> None:
    code = "import sys, selfspec.cli.app; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
