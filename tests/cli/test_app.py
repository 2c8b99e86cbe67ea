"""The entry of the command line, its options, what commands say of their work, and what the doctor finds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError
from typer.core import TyperGroup

import selfspec
from helpers.json_schema import OUTPUTS
from helpers.snippets import Invoke, Said
from selfspec.cli import terminal
from selfspec.cli.app import app
from selfspec.cli.options import read_draft
from selfspec.cli.search import verdict as verdict_of_search
from selfspec.cli.terminal import progress_bar
from selfspec.draft import LayerSkip
from selfspec.draft.registry import declarations
from selfspec.errors import DraftConfigError, SelfSpecError
from selfspec.measure.spare_cores import SpareCores
from selfspec.tools.doctor import MachineReport, Packages, findings, read_packages
from selfspec.tools.train.run import doubts


def test_version(invoke: Invoke) -> None:
    ending = invoke("--version")
    assert (ending.status, ending.stdout) == (0, f"selfspec {selfspec.__version__}\n")
    # Without words it helps.
    ending = invoke()
    assert ending.status == 2
    assert "error" not in ending.stderr


ROOT = Path(__file__).resolve().parents[2]


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, f"{name} ")
        else:
            yield before + name, command


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("words", [[], ["train"], *map(str.split, COMMANDS)], ids=" ".join)
def test_every_command_has_help(invoke: Invoke, words: list[str]) -> None:
    ending = invoke(*words, "-h")
    assert (ending.status, ending.stderr) == (0, "")
    assert f"Usage: {' '.join(['selfspec', *words])}" in ending.stdout
    if words not in ([], ["train"]):
        assert "--output" in ending.stdout
    # A dataclass of options is a panel.
    assert words != ["bench"] or "Device and weights" in ending.stdout


def commands_in(page: str) -> Iterator[list[str]]:
    """The words of every `selfspec COMMAND ...` in a page of Markdown: in its blocks of code, and in its text."""
    blocks = "\n".join(re.findall(r"^```.*?^```|^ {4}.*?$", page, re.MULTILINE | re.DOTALL))
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL))
    for line in [*blocks.replace("\\\n", " ").splitlines(), *spans]:
        found = re.search(r"\bselfspec ((?:train )?[a-z]+\b.*)", line.replace("\n", " ").partition(" #")[0])
        if found and {found[1].split()[0], " ".join(found[1].split()[:2])} & COMMANDS.keys():
            yield found[1].split()


@pytest.mark.parametrize("page", ["README.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))])
def test_the_commands_of_the_documentation_have_their_options(page: str) -> None:
    for words in commands_in((ROOT / page).read_text(encoding="utf-8")):
        command = COMMANDS[" ".join(words[: 2 if words[0] == "train" else 1])]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        options = {word.rstrip("]);,.:") for word in words if word.startswith("--")}
        assert options <= {*known, "--help"}, " ".join(words)


def test_every_kind_of_draft_is_listed(invoke: Invoke, said: Said) -> None:
    assert "selfspec drafts" in invoke("generate", "--help").stdout
    shown = invoke("drafts").stdout
    assert all(each.form in shown for each in declarations())
    assert [each["written"] for each in said("drafts")["drafts"]] == [each.form for each in declarations()]


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


def test_the_doctor_says_in_lines_what_it_found(invoke: Invoke, said: Said) -> None:
    ending = invoke("doctor")
    assert (ending.status, ending.stderr) == (0, "")
    assert ending.stdout.startswith(f"selfspec      {selfspec.__version__}")
    for line in ("versions      torch", "cores", "CPU kernels   ", "extras        "):
        assert line in ending.stdout
    assert ("What to change:" in ending.stdout) != ("Nothing here needs a change." in ending.stdout)
    assert said("doctor")["machine"]["processor"]


def test_every_command_that_prints_json_is_declared_and_described() -> None:
    assert OUTPUTS.keys() == {
        name for name, each in COMMANDS.items() if any("--output" in parameter.opts for parameter in each.params)
    }
    for output in OUTPUTS.values():
        schema = output.model_json_schema()
        assert schema["description"]
        assert "Attributes" not in schema["description"]
        assert "schema_version" in schema["required"]
        assert not schema["additionalProperties"]
    schema = OUTPUTS["inspect"].model_json_schema()
    assert schema["properties"]["exits"]["description"].startswith("for each exit")
    assert schema["$defs"]["Weights"]["required"] == ["parameters", "bytes"]
    assert "plan" not in schema["required"]


def test_what_is_not_declared_is_seen(said: Said, folder: str) -> None:
    printed = said("inspect", folder)
    lacking = {name: printed[name] for name in printed if name != "layers"}
    for wrong in ({**printed, "more": 1}, {**printed, "width": "64"}, {**printed, "schema_version": 2}, lacking):
        with pytest.raises(ValidationError):
            OUTPUTS["inspect"].model_validate_json(json.dumps(wrong), strict=True)


def test_blanks_in_names_mean_nothing() -> None:
    assert read_draft(" skip: mlp=1, 7-8 ; attn=0") == LayerSkip(attention=[0], mlp=[1, 7, 8])


@pytest.mark.parametrize(
    "text", ["", "None", "automatic", "exit", "exit:4,5", "skip", "skip:heads=1", "skip:attn=1,", "skip:attn=1--3"]
)
def test_anything_else_is_refused_with_how_to_write_it(text: str) -> None:
    kind = text.partition(":")[0]
    listed = "exit:E, head:FOLDER@E, skip, skip-file, int8, int4, upper"
    how = {"exit": "write exit:E", "skip": "write skip:PART"}.get(kind, listed)
    with pytest.raises(DraftConfigError, match=r"^--draft .* is not understood; ") as refused:
        read_draft(text)
    assert how in str(refused.value)
    assert len(str(refused.value).split()) <= 40


@pytest.mark.parametrize("draft", [each.example for each in declarations()])
def test_the_drafts_that_are_listed_are_of_the_grammar(draft: str) -> None:
    message = ""
    try:
        read_draft(draft)
    except SelfSpecError as error:
        message = str(error)
    # The files of the examples are not there.
    assert "not understood" not in message
    assert not message.startswith("--")


def test_what_looks_wrong_in_a_training_is_said() -> None:
    before = {"held_out_loss": 4.2}
    fine = [{"loss": 5.0}, {"held_out_loss": 4.25}, {"loss": 4.6}]
    assert doubts(before, fine) == []
    wrong = [*fine, {"loss": 6.1}, {"held_out_loss": 5.7}]
    rose, forgets = doubts(before, wrong)
    assert "rose from 4.60 to 6.10" in rose
    assert "rose from 4.20 to 5.70" in forgets


@pytest.mark.parametrize(("promised", "shown"), [(0.97, "0.97"), (1.0, "1.00")])
def test_of_a_search_that_found_one_and_of_one_in_which_all_sets_lose(promised: float, shown: str) -> None:
    found, next_step = verdict_of_search("demo", "skip:layers=3", 1.24, 12, Path("skip.json"))
    assert found == "12 sets evaluated; skip:layers=3 is predicted 1.24 times plain decoding. It is in skip.json."
    assert next_step == "Measure it before you rely on it: selfspec bench demo --draft skip-file:skip.json"
    found, next_step = verdict_of_search("demo", "skip:layers=3", promised, 1, Path("skip.json"))
    assert found.startswith("No skip set is predicted to beat plain decoding here; of 1 set evaluated skip:layers=3")
    assert f"predicted {shown} times plain decoding" in found
    assert "best" not in found
    assert "selfspec calibrate demo" in next_step
    assert "skip-file" not in next_step


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_EVERY", 0.05)


@pytest.mark.usefixtures("often")
def test_a_step_that_takes_long_is_said_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("measuring") as bar:
        bar.begin(4)
        bar.step("cell 1 of 2")
        bar.step("cell 2 of 2: [all]")
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 7
    assert lines[-1].startswith("measuring: 1 of 4, cell 2 of 2: [all]; ")
    assert "left" in lines[-1]


@pytest.mark.usefixtures("often")
def test_a_count_is_said_and_nothing_after_its_end_and_of_short_work(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("rounding") as bar:
        bar.reach(3, 12)
        time.sleep(0.12)
    said = capsys.readouterr().err
    assert "rounding: 3 of 12" in said
    time.sleep(0.12)
    with progress_bar("measuring") as bar:
        bar.begin(1)
    assert capsys.readouterr().err == ""


MACHINE = MachineReport(
    system="Linux x86_64",
    processor="a processor",
    cores=SpareCores(4, 4.0),
    load=0.1,
    memory=2**34,
    threads=4,
    omp_num_threads=None,
    gpus=[],
    accelerator=None,
    gpu_without_cuda=False,
    kernels="v4",
    kernels_absence=None,
)
PACKAGES = Packages({"torch": "2.13.0"}, {}, {})


def test_nothing_is_found_where_nothing_is_slow_and_versions_that_are_not_tested_are_named() -> None:
    assert [*findings(MACHINE, PACKAGES)] == []
    (found,) = findings(MACHINE, replace(PACKAGES, newer={"torch": "2.12"}))
    assert found == "torch 2.13.0 is newer than what selfspec is tested with (2.12): run selfspec verify"


@pytest.mark.parametrize(
    ("machine", "cause", "remedy"),
    [
        (
            replace(MACHINE, kernels=None, kernels_absence="no compiler; install g++"),
            "slower than with selfspec's CPU kernels",
            "install g++",
        ),
        (replace(MACHINE, cores=SpareCores(4, 1.2)), "only 1.2 of 4 cores are free", "--threads 1"),
        (replace(MACHINE, threads=1, omp_num_threads="1"), "OMP_NUM_THREADS=1 holds torch to 1 of 4", "--threads 4"),
        (replace(MACHINE, gpu_without_cuda=True), "built for CPUs alone", "torch with CUDA"),
    ],
)
def test_a_cause_comes_with_its_remedy(machine: MachineReport, cause: str, remedy: str) -> None:
    (found,) = findings(machine, PACKAGES)
    assert cause in found
    assert remedy in found
    assert "\n" not in found


def test_what_a_device_or_a_system_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    mps = replace(MACHINE, gpus=["mps"], accelerator="mps")
    (found,) = findings(mps, PACKAGES)
    assert "selfspec was never run on mps" in found
    monkeypatch.setattr("selfspec.tools.doctor.has_doubles", lambda _: False)
    monkeypatch.delattr(os, "preadv")
    device, system = findings(mps, PACKAGES)
    assert "mps has no float64" in device
    assert "has no preadv" in system


def test_what_is_newer_is_told_by_minor_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.16.1+cpu", "transformers": "5.24.9"}
    monkeypatch.setattr(metadata, "version", lambda name: installed.get(name, "9.0"))
    monkeypatch.setattr(metadata, "requires", lambda _: ["torch>=2.13,<2.17", "transformers>=5.20,<5.26"])
    monkeypatch.setattr(metadata, "metadata", lambda _: Message())
    found = read_packages()
    assert found.newer == {"torch": "2.15"}
