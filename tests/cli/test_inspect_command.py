"""`selfspec MODEL` and `selfspec inspect MODEL`: what a checkpoint can do here, and what it is made of."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from helpers import published_heads
from helpers.encoder_decoders import encoder_decoder
from helpers.running import Invoke
from helpers.studies import profile_of
from selfspec.control.profile import VARIABLE, default_file
from selfspec.measure.summary import describe


@pytest.fixture(autouse=True)
def no_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path_factory.mktemp("profiles")))


def test_tables(invoke: Invoke, folder: str) -> None:
    ending = invoke("inspect", folder, "--parts")
    assert (ending.status, ending.stderr) == (0, "")
    layers = ("LlamaForCausalLM", "5 layers", "self_attn: LlamaAttention", "layer 0-4, each: MLP")
    for said in (*layers, "exit:4", "260,032", "Drafting in fewer bits", "int8"):
        assert said in ending.stdout


def test_json_is_the_anatomy_of_the_loaded_model(invoke: Invoke, copied: Path, stories: PreTrainedModel) -> None:
    for file in copied.iterdir():
        if file.name != "config.json":
            file.unlink()
    found = json.loads(invoke("inspect", str(copied), "--output", "json").stdout)
    assert found.pop("schema_version") == 1
    assert found.pop("checkpoint") == str(copied)
    assert found.pop("versions").keys() == {"selfspec", "torch", "transformers", "python"}
    assert found.pop("here")["greedy"] == {"draft": "lookup+int8", "speedup": pytest.approx(1.9, abs=0.3)}
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


def test_a_checkpoint_alone_is_looked_at(invoke: Invoke, folder: str) -> None:
    shown = invoke(folder)
    assert (shown.status, shown.stdout) == (0, invoke("inspect", folder).stdout)
    said = " ".join(shown.stdout.split())
    assert "auto drafts with lookup+int8: about" in said
    assert "GiB on cpu: fits" in said
    assert f"selfspec calibrate {folder}" in said
    assert said.endswith(f"selfspec generate {folder} --prompt TEXT")


def test_what_was_measured_is_said(invoke: Invoke, folder: str, stories: PreTrainedModel) -> None:
    profile = profile_of(stories)
    profile.save(default_file(profile.setting))
    here = json.loads(invoke(folder, "--output", "json").stdout)["here"]
    assert here["greedy"] == {"draft": profile.greedy.draft, "speedup": profile.greedy.speedup[0]}
    assert here["profile"] == str(default_file(profile.setting))
    assert here["commands"][-1].startswith("selfspec generate")
    assert not any("calibrate" in each for each in here["commands"])
    elsewhere = replace(profile, setting=replace(profile.setting, threads=profile.setting.threads + 1))
    default_file(profile.setting).unlink()
    elsewhere.save(default_file(elsewhere.setting))
    assert "none of these weights that fits" in " ".join(invoke(folder).stdout.split())


def test_a_checkpoint_larger_than_memory_is_streamed(
    invoke: Invoke, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfspec.placement.weight_source.machine_bytes", lambda: 2**20)
    here = json.loads(invoke(folder, "--output", "json").stdout)["here"]
    assert not here["fits"]
    assert here["commands"][-1] == f"selfspec generate {folder} --memory 0MiB --prompt TEXT"


def test_an_encoder_decoder_is_run_from_python(invoke: Invoke, tmp_path: Path) -> None:
    encoder_decoder("bart", torch.float32).save_pretrained(tmp_path)
    commands = json.loads(invoke(str(tmp_path), "--output", "json").stdout)["here"]["commands"]
    assert commands[-1].startswith("selfspec.wrap(model")
    assert not any("generate " in each for each in commands)
