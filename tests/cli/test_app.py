"""The entry of the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import selfspec
from helpers.running import Invoke
from selfspec.cli.app import app
from selfspec.draft.registry import declarations


def test_version(invoke: Invoke) -> None:
    ending = invoke("--version")
    assert (ending.status, ending.stdout) == (0, f"selfspec {selfspec.__version__}\n")


ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    *("generate", "chat", "serve", "inspect", "verify", "calibrate"),
    *("demo", "bench", "ablate", "search", "quantize", "index", "train"),
)
TRAININGS = ("layerskip", "plain", "exit", "head", "average", "vocabulary")


@pytest.mark.parametrize(
    "words", [[], *([command] for command in COMMANDS), *(["train", training] for training in TRAININGS)], ids=" ".join
)
def test_every_command_has_help(invoke: Invoke, words: list[str]) -> None:
    ending = invoke(*words, "-h")
    assert (ending.status, ending.stderr) == (0, "")
    assert f"Usage: {' '.join(['selfspec', *words])}" in ending.stdout
    if words not in ([], ["train"]):
        assert "--output" in ending.stdout


def commands_in(page: str) -> Iterator[list[str]]:
    """The words of every `selfspec COMMAND ...` in a page of Markdown: in its blocks of code, and in its text."""
    blocks = "\n".join(re.findall(r"^```.*?^```|^ {4}.*?$", page, re.MULTILINE | re.DOTALL))
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL))
    for line in [*blocks.replace("\\\n", " ").splitlines(), *spans]:
        found = re.search(r"\bselfspec ((?:train )?[a-z]+\b.*)", line.replace("\n", " ").partition(" #")[0])
        if found and found[1].split()[0] in COMMANDS:
            yield found[1].split()


@pytest.mark.parametrize("page", ["README.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))])
def test_the_commands_of_the_documentation_have_their_options(page: str) -> None:
    for words in commands_in((ROOT / page).read_text(encoding="utf-8")):
        command: Any = typer.main.get_command(app)
        for word in words[: 2 if words[0] == "train" else 1]:
            command = command.commands.get(word, command)
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        options = {word.rstrip("]);,.:") for word in words if word.startswith("--")}
        assert options <= {*known, "--help"}, " ".join(words)


def test_every_kind_of_draft_is_listed(invoke: Invoke) -> None:
    assert "selfspec drafts" in invoke("generate", "--help").stdout
    shown = invoke("drafts").stdout
    assert all(each.form in shown for each in declarations())
    listed = json.loads(invoke("drafts", "--output", "json").stdout)["drafts"]
    assert [each["written"] for each in listed] == [each.form for each in declarations()]


def test_a_shell_can_complete_commands() -> None:
    environment = {**os.environ, "_SELFSPEC_COMPLETE": "complete_bash", "COMP_WORDS": "selfspec ge", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "selfspec"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert ended.stdout.split() == ["generate"]


def test_without_words_it_helps(invoke: Invoke) -> None:
    ending = invoke()
    assert ending.status == 2
    assert "error" not in ending.stderr


def test_a_mistake_of_ours_is_shown_with_its_place(
    invoke: Invoke, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("slip")

    monkeypatch.setattr("selfspec.measure.summary.describe", broken)
    ending = invoke("inspect", folder, "--output", "json")
    assert ending.status == 1
    assert json.loads(ending.stdout)["error"] == {"type": "RuntimeError", "message": "RuntimeError: slip"}
    assert "Traceback" in ending.stderr


def test_help_waits_for_no_heavy_import() -> None:
    code = "import sys, selfspec.cli.app; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_the_doctor_says_in_lines_what_it_found(invoke: Invoke) -> None:
    ending = invoke("doctor")
    assert (ending.status, ending.stderr) == (0, "")
    assert ending.stdout.startswith(f"selfspec      {selfspec.__version__}")
    for said in ("versions      torch", "cores", "CPU kernels   ", "products      torch: ", "extras        "):
        assert said in ending.stdout
    assert ("What to change:" in ending.stdout) != ("Nothing here needs a change." in ending.stdout)


def test_the_doctor_says_as_json_what_it_found(invoke: Invoke) -> None:
    ending = invoke("doctor", "--output", "json")
    found = json.loads(ending.stdout)
    assert ending.status == 0
    assert found.keys() >= {"machine", "packages", "products", "findings", "versions"}
    assert found["products"]["torch"]["four_rows"] > 0
