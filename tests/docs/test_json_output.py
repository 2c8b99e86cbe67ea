"""Every `--output json` fits the schema that is read off what its command returns, and says so by its version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from helpers import tiny
from helpers.saved_folders import checkpoint_folder
from helpers.snippets import Invoke
from helpers.tokenizers import written
from selfspec.cli.app import app
from selfspec.cli.json_schema import OUTPUTS, Failed, schema_of
from selfspec.control.profile import VARIABLE

pytestmark = pytest.mark.docs

TRAINING = "--steps 2 --batch 2 --length 16 --held-out-blocks 2"
BENCH = "--prompts 2 --max-new-tokens 16 --context 8 --repeats 1 --warm-up 1 --measure quality"
CALIBRATION = "--max-new-tokens 8 --repeats 1 --longest-draft 1"
STUDY = "--texts 2 --prompt-tokens 8 --max-new-tokens 16 --draft-length 1 --temperature 0 --threads 1"
# As quick as each can be; MODEL, TEXT and PROMPTS are files, TEMPLATE one of chats.
COMMANDS = {
    "generate": "generate MODEL --draft exit:2 --prompt Once --max-new-tokens 8",
    "chat": "chat MODEL --template TEMPLATE --max-new-tokens 4",
    "demo": "demo --seconds 0 --max-new-tokens 4",
    "inspect": "inspect MODEL",
    "doctor": "doctor",
    "drafts": "drafts",
    "pack": "pack PACKABLE --to packed",
    "export": "export MODEL --draft exit:2 --to exported",
    "calibrate": f"calibrate MODEL --draft exit:3 {CALIBRATION} --prompt-file PROMPTS",
    "verify": "verify MODEL --draft exit:2 --samples 100 --prompt-file PROMPTS",
    "bench": f"bench MODEL --workload w=PROMPTS --arm draft --draft exit:2 --to results {BENCH}",
    "quantize": "quantize MODEL --bits 8 --to file.safetensors",
    "index": "index MODEL --text TEXT --to corpus.safetensors",
    "search": f"search MODEL --to skip.json --evaluations 4 {STUDY}",
    "ablate": f"ablate --model MODEL --draft exits --confirm 1 --to study {STUDY}",
    "train layerskip": f"train layerskip MODEL --text TEXT --to faster --exits 2 --check-seconds 0 {TRAINING}",
    "train plain": f"train plain MODEL --text TEXT --to plain {TRAINING}",
    "train exit": f"train exit MODEL --text TEXT --to heads --exits 2 --rank 4 {TRAINING}",
    "train head": f"train head MODEL --kind eagle3 --text TEXT --to head --depth 2 {TRAINING}",
    "train average": "train average MODEL MODEL --to average --held-out TEXT --length 16",
    "train vocabulary": "train vocabulary MODEL --text TEXT --to vocabulary.json --size 16",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "MODEL").symlink_to(checkpoint_folder())
    tiny.llama().bfloat16().save_pretrained(tmp_path / "PACKABLE")
    stories = [f"Once upon a time, {name} had a big red ball and was very happy." for name in ("Tom", "Lily", "Ben")]
    (tmp_path / "TEXT").write_text("\n\n".join(stories * 20))
    (tmp_path / "PROMPTS.jsonl").write_text("".join(json.dumps({"prompt": story}) + "\n" for story in stories))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "profiles"))
    return tmp_path


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, f"{name} ")
        else:
            yield before + name, command


def test_every_command_that_prints_json_is_declared_and_tried() -> None:
    printing = {
        name
        for name, command in commands(typer.main.get_command(app))
        if any("--output" in parameter.opts for parameter in command.params)
    }
    # It serves until it is stopped: tests/cli/test_chat_command.py holds what it prints to its schema.
    assert printing == OUTPUTS.keys() == COMMANDS.keys() | {"serve"}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_prints_is_what_is_declared(command: str, invoke: Invoke, place: Path) -> None:
    words = COMMANDS[command].replace("PROMPTS", str(place / "PROMPTS.jsonl"))
    words = words.replace("TEMPLATE", written(place) if "TEMPLATE" in words else "")
    ending = invoke(*words.split(), "--output", "json", stdin=b"Tell me of Lily.\n")
    assert ending.status == 0, ending.stderr
    OUTPUTS[command].model_validate_json(ending.stdout, strict=True)
    assert json.loads(ending.stdout)["schema_version"] == 1


def test_rounds_are_declared_too(invoke: Invoke, place: Path) -> None:
    words = COMMANDS["generate"].split()
    ending = invoke(*words, "--show-drafts", "--output", "json")
    found = OUTPUTS["generate"].model_validate_json(ending.stdout, strict=True)
    assert found.model_dump()["rounds"]


def test_errors_are_declared(invoke: Invoke, place: Path) -> None:
    ending = invoke("generate", "MODEL", "--draft", "exit:99", "--prompt", "x", "--output", "json")
    assert ending.status == 2
    assert Failed.model_validate_json(ending.stdout, strict=True).error.type == "DraftConfigError"


def test_what_is_not_declared_is_seen(invoke: Invoke, place: Path) -> None:
    printed = json.loads(invoke("inspect", "MODEL", "--output", "json").stdout)
    for wrong in ({**printed, "more": 1}, {**printed, "width": "64"}, {**printed, "schema_version": 2}):
        with pytest.raises(ValidationError):
            OUTPUTS["inspect"].model_validate_json(json.dumps(wrong), strict=True)
    with pytest.raises(ValidationError):
        OUTPUTS["inspect"].model_validate({name: printed[name] for name in printed if name != "layers"})


def test_schemas_describe_commands() -> None:
    for command in OUTPUTS:
        schema = schema_of(command)
        assert schema["description"]
        assert "Attributes" not in schema["description"]
        assert "schema_version" in schema["required"]
        assert not schema["additionalProperties"]
    schema = schema_of("inspect")
    assert schema["properties"]["exits"]["description"].startswith("for each exit")
    assert schema["$defs"]["Weights"]["required"] == ["parameters", "bytes"]
    assert "plan" not in schema["required"]
