"""Checkpoints loaded whole are what `transformers` loads, at a peak of the model, or are refused before it is read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.shrunken import shrunken
from selfspec.errors import UnsupportedOptionError
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.summary import describe
from selfspec.placement.stored import MappedFiles
from selfspec.placement.weight_source import FromDisk
from selfspec.placement.whole import CONTEXT, account, load_whole, survey_whole
from selfspec.process import give_back_free_memory, status_bytes


def same(found: PreTrainedModel, folder: Path, dtype: torch.dtype | str = "auto") -> None:
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert dict(found.state_dict()).keys() == dict(wanted.state_dict()).keys()
    for name, weight in found.state_dict().items():
        assert torch.equal(weight, wanted.state_dict()[name]), name
    assert (found.training, found.name_or_path) == (wanted.training, wanted.name_or_path)
    prompt = tiny.prompt(5)
    assert torch.equal(found(prompt).logits, wanted(prompt).logits)


@pytest.mark.parametrize("free", [0, 2**40], ids=["mapped", "copied"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_model_is_as_transformers_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, free: int
) -> None:
    monkeypatch.setattr("selfspec.placement.whole.free_bytes", lambda: free)
    # As on Windows.
    monkeypatch.delattr(os, "preadv")
    model = shrunken("mixtral", torch.float32) if name == "mixtral" else tiny.BUILDERS[name](dtype=torch.float32)
    model.save_pretrained(tmp_path)
    found = load_whole(str(tmp_path), dtype=dtype)
    same(found, tmp_path, dtype)
    again = tmp_path / "again"
    found.save_pretrained(again)
    same(load_whole(str(again)), again)


def test_a_folder_is_loaded_without_a_budget(tmp_path: Path) -> None:
    model = tiny.llama()
    model.save_pretrained(tmp_path)
    spec = selfspec.load(tmp_path, draft="exit:2")
    assert spec.draft == selfspec.drafts.EarlyExit(2)
    assert selfspec.load(tmp_path, draft=False).draft is None
    wanted = model.generate(tiny.prompt(5), max_new_tokens=8, do_sample=False)
    assert torch.equal(spec.generate(tiny.prompt(5), max_new_tokens=8, do_sample=False).sequences, wanted)


def test_too_little_memory_is_told_before_a_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.llama().save_pretrained(tmp_path)
    monkeypatch.setattr(FromDisk, "in_use", lambda _: 0)
    monkeypatch.setattr("selfspec.placement.whole._OF_MEMORY", 1.0)
    monkeypatch.setattr(MappedFiles, "read", lambda *_: pytest.fail("a weight was read"))
    needed = account(survey_whole(str(tmp_path), None, CONTEXT, FromDisk()), None).total
    for there, remedy in ((needed - 1, r"stream what.*--memory \d+MiB"), (2**20, "neither can it be streamed")):
        monkeypatch.setattr("selfspec.placement.weight_source.machine_bytes", lambda there=there: there)
        with pytest.raises(UnsupportedOptionError, match=f"takes .* for weights that stay.*{remedy}"):
            selfspec.load(tmp_path)


def test_the_peak_of_a_load_is_the_model(tmp_path: Path) -> None:
    model = tiny.llama(dtype=torch.float32, vocab_size=40_000, hidden_size=256, intermediate_size=512)
    model.save_pretrained(tmp_path)
    size = sum(weight.nbytes for weight in model.parameters())
    del model
    give_back_free_memory()
    try:
        # The peak begins again at the present.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not tell")
    before = status_bytes("VmRSS")
    load_whole(str(tmp_path))
    # One weight, the head, is half of it.
    assert status_bytes("VmHWM") - before < 1.6 * size


def test_sizes_of_a_quantised_checkpoint_are_those_of_its_files(tmp_path: Path) -> None:
    model = tiny.llama(dtype=torch.float32, num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    # As HQQ does: some tensors in place of a weight.
    tensors = {}
    for name, weight in model.state_dict().items():
        if "_proj" in name:
            place = name.removesuffix(".weight")
            tensors[f"{place}.qweight"] = torch.zeros(weight.numel() // 8, dtype=torch.int32)
            tensors[f"{place}.scales"] = torch.zeros(weight.numel() // 32, dtype=torch.float16)
        else:
            tensors[name] = weight.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    surveyed = survey_whole(str(tmp_path), None, 64, FromDisk())
    wanted = sum(tensor.nbytes for tensor in tensors.values())
    assert surveyed.memory.kept == wanted
    assert account(surveyed, None).account["for weights that stay"] == wanted
    assert describe(surveyed.skeleton.model).total.bytes == wanted


def test_a_checkpoint_is_loaded_with_its_tokenizer() -> None:
    found = load_checkpoint(str(selfspec.demo.checkpoint_folder()))
    assert found.encode("import").shape[0] == 1
