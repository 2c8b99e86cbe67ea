"""`selfspec inspect`: the anatomy as tables or JSON, from the configuration alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel

from helpers.running import Invoke
from selfspec.model.summary import describe


def test_tables(invoke: Invoke, folder: str) -> None:
    ending = invoke("inspect", folder)
    assert (ending.status, ending.stderr) == (0, "")
    for said in (
        "LlamaForCausalLM",
        "5 layers",
        "self_attn: LlamaAttention",
        "layer 0-4, each: MLP",
        "exit:4",
        "260,032",
        "Drafting in fewer bits",
        "int8",
    ):
        assert said in ending.stdout


def test_json_is_the_anatomy_of_the_loaded_model(invoke: Invoke, copied: Path, stories: PreTrainedModel) -> None:
    for file in copied.iterdir():
        if file.name != "config.json":
            file.unlink()
    found = json.loads(invoke("inspect", str(copied), "--output", "json").stdout)
    assert found.pop("schema_version") == 1
    assert found.pop("checkpoint") == str(copied)
    assert found.pop("versions").keys() == {"selfspec", "torch", "transformers", "python"}
    assert found == json.loads(json.dumps(asdict(describe(stories))))


def test_a_folder_that_is_not_there(invoke: Invoke, tmp_path: Path) -> None:
    ending = invoke("inspect", str(tmp_path / "none"), "--output", "json")
    assert ending.status == 2
    assert json.loads(ending.stdout)["error"]["type"] == "CheckpointError"


def test_the_plan_of_a_budget(invoke: Invoke, folder: str) -> None:
    ending = invoke("inspect", folder, "--memory", "8GiB", "--context", "100")
    assert (ending.status, ending.stderr) == (0, "")
    for said in ("Within 8GiB on cpu, for 100 tokens", "5 of 5", "nothing", "tokens/s"):
        assert said in ending.stdout
    plan = json.loads(invoke("inspect", folder, "--memory", "8GiB", "--output", "json").stdout)["plan"]
    assert (plan["context"], plan["streamed"], plan["bits"]) == (4096, 0, None)
    assert plan["total"] == sum(plan["memory"][part] for part in ("process", "kept", "cache", "working")) + sum(
        plan["memory"]["layers"]
    )
    assert "too little" in invoke("inspect", folder, "--memory", "1MiB").stderr
