"""Checkpoints of quantising libraries run in their own bytes: texts are those of the weights that they stand for."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.copies import plan
from helpers.quantised import (
    FP8,
    awq,
    compressed,
    compressed_config,
    float8,
    gptq,
    in_groups,
    normal_float4,
    nvfp4,
    save_quantised,
    scaled_float8,
)
from selfspec.errors import CheckpointError, SelfSpecError, UnsupportedModelError
from selfspec.formats.packed import PackedWeight
from selfspec.model.checkpoint import read_config
from selfspec.placement.packed import has_packed_weights
from selfspec.placement.place import place
from selfspec.placement.quantised import why_not_read
from selfspec.placement.survey import survey
from selfspec.placement.weight_source import FromDisk
from selfspec.runtime import Native

GROUP = 16
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
by_each_kind = pytest.mark.parametrize(
    ("bits", "symmetric", "library"),
    [
        *((4, True, "compressed"), (4, False, "compressed"), (8, True, "compressed"), (8, False, "compressed")),
        *((4, True, "gptq"), (8, False, "gptq"), (4, False, "gptq_v2"), (4, False, "awq")),
        *((8, True, "fp8"), (4, True, "bitsandbytes"), (4, False, "bitsandbytes")),
        *((8, True, "float-quantized"), (4, True, "nvfp4-pack-quantized")),
    ],
)


def saved(folder: Path, bits: int = 4, symmetric: bool = True, library: str = "compressed") -> PreTrainedModel:
    layout: Any = partial(compressed, bits=bits, symmetric=symmetric)
    about = compressed_config(bits, symmetric, GROUP)
    if library == "awq":
        layout, about = (
            awq,
            {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        )
    elif library.endswith("quantized"):
        about["format"] = library
    elif library != "compressed":
        layout = partial(gptq, bits=bits, less=int(library == "gptq"))
        about = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": library}
    laid_out = in_groups(bits, GROUP, symmetric, layout)
    if library == "fp8":
        laid_out, about = float8, FP8
    elif library.endswith("quantized"):
        laid_out = nvfp4 if library.startswith("nvfp4") else scaled_float8
    elif library == "bitsandbytes":
        laid_out, about = partial(normal_float4, rounded=symmetric), {"quant_method": library, "load_in_4bit": True}
    # Scales in the dtype in which each library keeps them.
    dtype = torch.float16 if library in ("gptq", "gptq_v2", "awq") else torch.bfloat16
    return save_quantised(tiny.llama(dtype=dtype), folder, laid_out, about)


def packed_names(model: PreTrainedModel) -> set[str]:
    return {name for name, weight in model.named_parameters() if isinstance(weight, PackedWeight)}


@by_each_kind
def test_texts_and_programs_are_those_of_the_dense_weights(
    tmp_path: Path, bits: int, symmetric: bool, library: str
) -> None:
    model = saved(tmp_path, bits, symmetric, library)
    found = selfspec.load(tmp_path, dtype="float32").model
    assert len(packed_names(found)) == 7 * found.config.num_hidden_layers
    assert getattr(found.config, "quantization_config", None) is None
    prompt = tiny.prompt(9)
    with torch.no_grad():
        torch.testing.assert_close(found(prompt).logits, model(prompt).logits)
    expected = model.generate(prompt, **OPTIONS)
    assert torch.equal(found.generate(prompt, **OPTIONS), expected)
    asked = {**OPTIONS, "return_dict_in_generate": True, "output_logits": True}
    ours, theirs = (selfspec.wrap(each, runtime=Native(after=0)) for each in (found, model))
    one, other = (each.generate(prompt, **asked) for each in (ours, theirs))
    assert torch.equal(one.sequences, expected)
    assert bool(ours.programs.proved) == bool(theirs.programs.proved)
    assert all(torch.equal(*pair) for pair in zip(one.logits or (), other.logits or (), strict=True))


@pytest.mark.parametrize(
    ("draft", "library"),
    [("lookup", "gptq"), ("exit:2", "compressed"), ("int8", "gptq"), ("lookup+int4", "compressed"), ("int4", "fp8")],
)
def test_drafts_run_over_them(tmp_path: Path, draft: str, library: str) -> None:
    expected = saved(tmp_path, 8, library=library).generate(tiny.prompt(9), **OPTIONS)
    spec = selfspec.load(tmp_path, dtype="float32", draft=draft)
    assert torch.equal(spec.generate(tiny.prompt(9), **OPTIONS, draft_length=3).sequences, expected)


def test_nothing_is_expanded_and_what_is_saved_is_dense(tmp_path: Path) -> None:
    model = saved(tmp_path)
    found = selfspec.load(tmp_path)
    weights = {id(weight): weight for weight in found.model.parameters()}.values()
    file = sum(each.nbytes for each in load_file(tmp_path / "model.safetensors").values())
    assert sum(weight.nbytes for weight in weights) <= file
    found.model.save_pretrained(tmp_path / "dense")
    again = selfspec.wrap(type(model).from_pretrained(tmp_path / "dense", dtype=torch.float32))
    assert torch.equal(
        again.model.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight.bfloat16()
    )


@by_each_kind
def test_codes_are_streamed_as_they_lie(tmp_path: Path, bits: int, symmetric: bool, library: str) -> None:
    model = saved(tmp_path, bits, symmetric, library)
    surveyed = survey(str(tmp_path), torch.float32, 128, FromDisk())
    codes = [
        weight.parts[part]
        for layer in surveyed.layers
        for each in layer
        for weight in each.weights.values()
        for part in weight.fetched()
    ]
    assert {each.file.name for each in codes} == {"model.safetensors"}
    spec = selfspec.wrap(place(surveyed, plan(1, None, 0)))
    for _ in range(2):
        assert torch.equal(
            spec.generate(tiny.prompt(9), **OPTIONS).sequences, model.generate(tiny.prompt(9), **OPTIONS)
        )


def _about(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= fields
    file.write_text(json.dumps(config))


def _tensors(folder: Path, fields: dict[str, Any], name: str = "weight_") -> None:
    file = folder / "model.safetensors"
    changed = load_file(file) | {f"model.layers.0.mlp.up_proj.{name}{part}": each for part, each in fields.items()}
    save_file({name: each for name, each in changed.items() if each is not None}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("about", "tensors", "words"),
    [
        ({"quant_method": "hqq"}, {}, "weights in 'hqq'"),
        ({"format": "int-quantized"}, {}, "compressed-tensors in int-quantized"),
        ({"kv_cache_scheme": {"num_bits": 8}}, {}, "with kv_cache_scheme"),
        ({"config_groups": {"a": {"input_activations": {"num_bits": 8}}}}, {}, "rounded activations"),
        ({"config_groups": {"a": {"output_activations": {"num_bits": 8}}}}, {}, "rounded activations"),
        ({}, {"g_idx": torch.zeros(64, dtype=torch.int32)}, "in the order of activations"),
        ({}, {"scale": torch.ones(48, 8, dtype=torch.bfloat16)}, "up_proj.weight in groups"),
    ],
)
def test_what_no_kernel_reads_is_left_to_its_library_and_refused_by_name_within_a_budget(
    tmp_path: Path, about: dict[str, Any], tensors: dict[str, torch.Tensor], words: str
) -> None:
    saved(tmp_path)
    _about(tmp_path, **about)
    _tensors(tmp_path, tensors)
    assert words in str(why_not_read(tmp_path, read_config(str(tmp_path))))
    assert not has_packed_weights(str(tmp_path))
    with pytest.raises(UnsupportedModelError, match=f"{words}.*load it without memory="):
        selfspec.load(tmp_path, "2GiB")


@pytest.mark.parametrize(
    ("library", "about", "tensors", "words"),
    [
        ("gptq", {"checkpoint_format": "marlin"}, {}, "GPTQ in marlin"),
        ("gptq", {"dynamic": {"-:.*up_proj": {}}}, {}, "GPTQ in settings by layer"),
        ("gptq", {}, {"g_idx": torch.arange(64, dtype=torch.int32) % 4}, "in the order of activations"),
        ("gptq", {}, {"qzeros": torch.full((4, 16), -1, dtype=torch.int32)}, "read in two ways"),
        ("gptq", {"bits": 2}, {}, "GPTQ in 2 bits"),
        ("awq", {"version": "gemv"}, {}, "AWQ in gemv"),
        ("fp8", {"activation_scheme": "static"}, {}, "fixed scales of activations"),
        ("fp8", {}, {"weight": torch.zeros(48, 32)}, "up_proj.weight in torch.float32"),
        ("nvfp4-pack-quantized", {"config_groups": {"a": {"input_activations": {"num_bits": 4}}}}, {}, "activations"),
        ("bitsandbytes", {"load_in_4bit": False}, {}, "bitsandbytes in 8 bits"),
    ],
)
def test_what_no_kernel_reads_of_others_is_left_to_its_library(
    tmp_path: Path, library: str, about: dict[str, Any], tensors: dict[str, torch.Tensor], words: str
) -> None:
    saved(tmp_path, library=library)
    _about(tmp_path, **about)
    _tensors(tmp_path, tensors, "")
    assert words in str(why_not_read(tmp_path, read_config(str(tmp_path))))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"shape": None}, "a part is missing"),
        ({"zero_point": torch.zeros(1, 4, dtype=torch.int32)}, "the zeros of .* are torch.int32"),
        ({"packed": torch.zeros(4, 8, dtype=torch.int32)}, "the codes of"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, Any], words: str) -> None:
    saved(tmp_path, library="compressed")
    _tensors(tmp_path, tensors)
    error: type[SelfSpecError] = CheckpointError
    with pytest.raises(error, match=words):
        selfspec.load(tmp_path)


@pytest.mark.parametrize(
    ("library", "tensors", "words"),
    [
        ("bitsandbytes", {"weight.absmax": None}, "a part is missing"),
        ("bitsandbytes", {"weight.nested_absmax": torch.ones(2)}, "the factors of"),
        ("fp8", {"weight": None}, "is missing beside its scales"),
        ("fp8", {"weight_scale_inv": torch.ones(2, 2)}, "the scales of"),
        ("nvfp4-pack-quantized", {"weight_scale": None}, "a part is missing"),
        ("nvfp4-pack-quantized", {"weight_global_scale": torch.ones(2)}, "the divisor of"),
    ],
)
def test_parts_of_others_that_do_not_fit_are_refused(
    tmp_path: Path, library: str, tensors: dict[str, Any], words: str
) -> None:
    saved(tmp_path, 8, library=library)
    _tensors(tmp_path, tensors, "")
    error: type[SelfSpecError] = CheckpointError
    with pytest.raises(error, match=words):
        selfspec.load(tmp_path)
