"""`selfspec calibrate` and what `--draft auto` then does; `selfspec inspect`: what a checkpoint can do here."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import published_heads, tiny
from helpers.encoder_decoders import encoder_decoder
from helpers.snippets import Invoke, Said
from helpers.studies import calibrated, profile_of
from selfspec import Profile
from selfspec.control.profile import VARIABLE, default_file
from selfspec.measure.summary import describe
from selfspec.model.registry import find_adapter
from selfspec.model.sizes import bytes_read
from selfspec.placement.drafts import placement_of
from selfspec.placement.weight_source import FromDisk

pandas = pytest.importorskip("pandas")

# As quick as it can be: one exit, one short prompt.
QUICK = ("--draft", "exit:3", "--max-new-tokens", "8", "--repeats", "1", "--longest-draft", "1", "--threads", "1")


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "profiles"))
    return tmp_path / "profiles"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Once upon a time"}\n{"text": "Tom had a big red ball."}\n')
    return file


@pytest.mark.tools
def test_a_profile_is_written_and_drafted_with(
    invoke: Invoke, said: Said, folder: str, profiles: Path, prompts: Path
) -> None:
    kept = profiles.parent / "kept"
    result = said("calibrate", folder, *QUICK, "--prompt-file", str(prompts), "--keep", str(kept))
    # What was generated is a table of the lab.
    texts = pandas.read_json(kept / "runs.jsonl", lines=True)
    assert set(texts[texts["batch"] == 1]["call"]) == {0, 1}
    tried = {each["name"].partition(",")[0] for each in result["report"]["greedy"]["confirmed"]}
    assert {"none", *tried} == {*texts[texts["temperature"] == 0]["draft"].fillna("none")}
    assert (texts["new_tokens"] == 8).all()
    table = pandas.read_parquet(kept / "table.parquet")
    lines = table[(table["temperature"] == 0) & (table["batch"] == 1)].set_index("draft")
    assert lines.loc["lookup", "speedup"] > 0
    assert lines.loc["lookup", "equal"] == 1
    file = Path(result["profile"])
    assert file.parent == profiles
    profile = Profile.load(file)
    assert result["greedy"]["draft"] == profile.greedy.draft
    assert result["setting"]["threads"] == 1
    assert result["report"]["settings"]["prompts"] == 2

    words = ("generate", folder, "--prompt", "Once", "--max-new-tokens", "12", "--threads", "1")
    auto = said(*words, "--draft", "auto")
    assert auto["token_ids"] == said(*words)["token_ids"]
    assert auto["settings"]["draft"] == "auto"
    assert invoke(*words, "--draft", f"auto:{file}").status == 0
    verified = invoke("verify", folder, "--draft", "auto", "--threads", "1", "--samples", "100", "--output", "json")
    chosen = {profile.greedy.draft, profile.sampled.draft} - {"none"}
    if chosen:
        assert verified.status == 0, verified.stderr
        assert {each["draft"] for each in json.loads(verified.stdout)["drafts"]} == {"none", *chosen}
    else:
        assert verified.status == 2

    other = invoke(*words[:-1], "2", "--draft", "auto")
    assert other.status == 2
    assert "CPU threads 1 there, 2 here" in other.stderr
    assert "selfspec calibrate" in other.stderr


def test_tables_say_what_was_found(
    invoke: Invoke, folder: str, tmp_path: Path, stories: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "selfspec.tools.calibrate.calibration.calibrate", lambda *_given, **_options: calibrated(stories)
    )
    file = tmp_path / "mine.json"
    ending = invoke("calibrate", folder, "--to", str(file))
    assert ending.status == 0, ending.stderr
    for words in ("1.250", " 0.75 ", "1.38 at 3", "(1.00-1.50)", "(0.50-1.00)", "0.62", "2.50"):
        assert words in ending.stdout
    assert f"auto:{file}" in ending.stdout
    assert "Chosen: lookup+exit:2, 1.50 times as fast as plain decoding." in ending.stdout
    assert "No draft beat plain decoding here" in ending.stdout
    assert Profile.load(file).sampled.draft == "none"


def test_auto_needs_no_profile_but_one_that_is_named_has_to_be_there(
    invoke: Invoke, folder: str, profiles: Path
) -> None:
    ending = invoke("generate", folder, "--prompt", "Once", "--max-new-tokens", "4", "--draft", "auto")
    assert ending.status == 0, ending.stderr
    missing = invoke("generate", folder, "--prompt", "Once", "--draft", f"auto:{profiles}/none.json")
    assert missing.status == 2
    assert "selfspec calibrate" in missing.stderr


@pytest.fixture(autouse=True)
def no_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path_factory.mktemp("profiles")))


def test_facts(invoke: Invoke, folder: str) -> None:
    ending = invoke("inspect", folder)
    assert (ending.status, ending.stderr) == (0, "")
    for said in ("LlamaForCausalLM", "5 layers", "self_attn: LlamaAttention", "260,032"):
        assert said in ending.stdout


def test_json_is_the_anatomy_of_the_loaded_model(said: Said, copied: Path, stories: PreTrainedModel) -> None:
    for file in copied.iterdir():
        if file.name != "config.json":
            file.unlink()
    found = said("inspect", str(copied))
    assert found.pop("schema_version") == 1
    assert found.pop("checkpoint") == str(copied)
    assert found.pop("versions").keys() == {"selfspec", "torch", "transformers", "python"}
    assert found.pop("here")["greedy"] == {"draft": "lookup+int8", "speedup": pytest.approx(1.9, abs=0.3)}
    assert found == json.loads(json.dumps(asdict(describe(stories))))


def test_modules_for_multi_token_prediction_are_said(invoke: Invoke, said: Said, tmp_path: Path) -> None:
    published_heads.mtp(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    assert "1 by its config: --draft mtp" in invoke("inspect", str(tmp_path)).stdout
    assert said("inspect", str(tmp_path))["mtp"] == 1


def test_the_plan_of_a_budget(invoke: Invoke, said: Said, folder: str) -> None:
    ending = invoke("inspect", folder, "--memory", "8GiB", "--context", "100")
    assert (ending.status, ending.stderr) == (0, "")
    for words in ("Within 8GiB on cpu, for 100 tokens", "5 of 5", "nothing", "tokens/s"):
        assert words in ending.stdout
    plan = said("inspect", folder, "--memory", "8GiB")["plan"]
    assert (plan["context"], plan["streamed"], plan["bits"]) == (4096, 0, None)
    assert plan["total"] == sum(plan["memory"][part] for part in ("process", "kept", "cache", "working")) + sum(
        plan["memory"]["layers"]
    )
    assert "too little" in invoke("inspect", folder, "--memory", "1MiB").stderr


def test_weights_in_planes_are_looked_at_as_they_are_loaded(invoke: Invoke, said: Said, tmp_path: Path) -> None:
    source, packed = str(tmp_path / "model"), str(tmp_path / "packed")
    tiny.llama(hidden_size=256, intermediate_size=512).bfloat16().float().save_pretrained(source)
    selfspec.pack(source, packed)
    dense, asked, found = said("inspect", source), said("inspect", source, "--weights", "planes"), said(packed)
    assert found["here"]["weights"] == asked["here"]["weights"] == "planes"
    assert found["total"] == asked["total"]
    assert found["total"]["bytes"] == found["here"]["packed"] == dense["here"]["packed"] < 0.4 * dense["total"]["bytes"]
    # Of 12 bits a copy in 8 reads too many to gain for sure: nothing drafts unless it is named.
    model = selfspec.load(packed).model
    assert [each["here"]["greedy"]["draft"] for each in (dense, asked, found)] == ["lookup+int8", "none", "none"]
    assert selfspec.wrap(model, "auto").draft is None
    assert found["target_bytes_read"] == pytest.approx(bytes_read(model, find_adapter(model)), rel=0.05)
    within = ("--memory", "8GiB")
    plans = [said("inspect", *each, *within)["plan"] for each in ((packed,), (source, "--weights", "planes"))]
    placed = placement_of(selfspec.load(packed, "8GiB").model)
    assert placed is not None
    for plan in plans:
        assert plan["memory"]["layers"] == plans[0]["memory"]["layers"]
        assert plan["memory"]["parts"]["upper"][0] > 0
        assert sum(plan["memory"]["layers"]) < 0.4 * dense["total"]["bytes"]
        assert plan["resident"] == placed.plan.resident
    shown = " ".join(invoke("inspect", source, "--weights", "planes").stdout.split())
    assert "all of this is for weights in planes" in shown
    assert asked["here"]["commands"][-1].endswith("/model --weights planes --prompt TEXT")
    tiny.llama().float().save_pretrained(tmp_path / "float32")
    assert "more bits than bfloat16" in invoke("inspect", str(tmp_path / "float32"), "--weights", "planes").stderr


def test_a_checkpoint_alone_is_looked_at(invoke: Invoke, folder: str) -> None:
    shown = [invoke(*each).stdout for each in ((folder,), ("inspect", folder))]
    # As many tokens as the model was made for.
    assert "with 512 tokens" in " ".join(shown[0].split())
    # The process grows meanwhile.
    both = [re.sub("(?s)at its peak.*to work with", "", each) for each in shown]
    assert both[0] == both[1]
    said = " ".join(both[0].split())
    assert "auto drafts with lookup+int8: about" in said
    assert "GiB on cpu: fits" in said
    assert f"selfspec calibrate {folder}" in said
    assert said.endswith(f"selfspec generate {folder} --prompt TEXT")


def test_what_was_measured_is_said(invoke: Invoke, said: Said, folder: str, stories: PreTrainedModel) -> None:
    profile = profile_of(stories)
    profile.save(default_file(profile.setting))
    here = said(folder)["here"]
    assert here["greedy"] == {"draft": profile.greedy.draft, "speedup": profile.greedy.speedup[0]}
    assert here["profile"] == str(default_file(profile.setting))
    assert here["commands"][-1].startswith("selfspec generate")
    assert not any("calibrate" in each for each in here["commands"])
    elsewhere = replace(profile, setting=replace(profile.setting, threads=profile.setting.threads + 1))
    default_file(profile.setting).unlink()
    elsewhere.save(default_file(elsewhere.setting))
    assert "none of these weights that fits" in " ".join(invoke(folder).stdout.split())


def test_a_checkpoint_larger_than_memory_is_streamed(said: Said, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FromDisk, "in_use", lambda _: 0)
    monkeypatch.setattr("selfspec.placement.whole._OF_MEMORY", 1.0)
    there = sum(said(folder)["here"]["account"].values()) - 1
    monkeypatch.setattr("selfspec.placement.weight_source.machine_bytes", lambda: there)
    here = said(folder)["here"]
    assert not here["fits"]
    assert here["commands"][-1] == f"selfspec generate {folder} --memory {there // 2**20}MiB --prompt TEXT"


def test_an_encoder_decoder_is_run_from_python(said: Said, tmp_path: Path) -> None:
    encoder_decoder("bart", torch.float32).save_pretrained(tmp_path)
    commands = said(str(tmp_path))["here"]["commands"]
    assert commands[-1].startswith("selfspec.wrap(model")
    assert not any("generate " in each for each in commands)
