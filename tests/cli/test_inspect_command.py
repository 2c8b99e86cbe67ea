"""`selfspec inspect`: the anatomy as tables or JSON, from the configuration alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from helpers import published_heads
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


def test_modules_for_multi_token_prediction_are_said(invoke: Invoke, tmp_path: Path) -> None:
    published_heads.mtp(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    weights = load_file(tmp_path / "model.safetensors")
    module = [each for name, each in weights.items() if ".layers.4." in name]
    shown = invoke("inspect", str(tmp_path)).stdout
    assert f"1, {sum(each.numel() for each in module):,} parameters: draft mtp" in shown
    save_file(
        {name: each for name, each in weights.items() if ".layers.4." not in name}, tmp_path / "model.safetensors"
    )
    shown = " ".join(invoke("inspect", str(tmp_path)).stdout.split())
    assert "the config promises 1, and the files have none: download the checkpoint whole" in shown
    found = json.loads(invoke("inspect", str(tmp_path), "--output", "json").stdout)["mtp"]
    assert found == {"promised": 1, "held": 0, "parameters": 0}
    (tmp_path / "model.safetensors").unlink()
    found = json.loads(invoke("inspect", str(tmp_path), "--output", "json").stdout)["mtp"]
    assert found == {"promised": 1, "held": None, "parameters": 0}


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
