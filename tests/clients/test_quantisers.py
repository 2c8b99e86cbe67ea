"""Checkpoints that quantising libraries make and save: text is the library's own, in as many bytes as it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.formats.packed import PackedWeight

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


def by_bitsandbytes(dense: Path, made: Path, kind: str, rounded: bool) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=rounded,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config, dtype=torch.float32)
    model.save_pretrained(made)


def by_compressed_tensors(dense: Path, made: Path, scheme: str, weights: dict[str, Any]) -> None:
    library = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    named: Any = {"group_0": {"targets": ["Linear"], "weights": weights}} if weights else {scheme: ["Linear"]}
    config = QuantizationConfig(config_groups=named, ignore=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    apply_quantization_config(model, config)
    for module in model.modules():
        if (found := getattr(module, "quantization_scheme", None)) is not None:
            weight, whole = module.weight.detach(), getattr(module, "weight_global_scale", None)
            groups = weight.unflatten(1, (-1, found.weights.group_size or weight.shape[1]))
            if whole is not None:
                whole.data.copy_(generate_gparam(weight.amin(), weight.amax()))
            if hasattr(module, "input_global_scale"):
                module.input_global_scale.data.fill_(100)
            scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), found.weights, whole)
            module.weight_scale.data.copy_(scales)
    compressor = library.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(made)
    compressor.update_config(made)


def integers(bits: int, group: int) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}


def stock(made: Path, whole: bool = True) -> PreTrainedModel:
    """The library's own model in float32; some of its weights it makes in bfloat16 all the same."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        made, dtype=torch.float32 if whole else torch.bfloat16
    )
    for module in model.modules():
        # Where the processor has AVX512-BF16, bitsandbytes multiplies in bfloat16, whatever the dtype.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    model(tiny.prompt(1))
    nn.Module.float(model)
    return model


@pytest.mark.parametrize(
    ("make", "how"),
    [
        *((by_bitsandbytes, (kind, rounded)) for kind in ("nf4", "fp4") for rounded in (False, True)),
        # With zeros, transformers 5.24 does not load what the library packs.
        *((by_compressed_tensors, ("", integers(bits, group))) for bits in (4, 8) for group in (32, 64)),
        (by_compressed_tensors, ("", {"num_bits": 8, "type": "float", "strategy": "channel"})),
        *((by_compressed_tensors, (scheme, {})) for scheme in ("NVFP4A16", "MXFP4A16")),
    ],
)
def test_text_is_the_librarys_own(tmp_path: Path, make: Any, how: tuple[Any, Any]) -> None:
    dense, made = tmp_path / "dense", tmp_path / "made"
    tiny.llama(**SIZES).save_pretrained(dense)
    make(dense, made, *how)
    expected = stock(made, "FP4A16" not in str(how[0])).generate(tiny.prompt(7), **OPTIONS)
    for draft in ("none", "exit:2", "lookup+int8"):
        spec = selfspec.load(made, dtype="float32", draft=draft)
        assert torch.equal(spec.generate(tiny.prompt(7), **OPTIONS).sequences, expected)
    packed = [each for each in spec.model.parameters() if isinstance(each, PackedWeight)]
    assert len(packed) == 7 * tiny.DEPTH
    # Beside each weight in NVFP4 there is a table of what its scales stand for.
    tables = 1200 * len(packed) if how[0] == "NVFP4A16" else 0
    held = sum(each.nbytes for each in spec.model.parameters()) - tables
    assert held <= 1.02 * sum(file.stat().st_size for file in made.glob("*.safetensors"))


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W8A8"])
def test_rounded_activations_run_as_the_library_runs_them(tmp_path: Path, scheme: str) -> None:
    dense, made = tmp_path / "dense", tmp_path / "made"
    tiny.llama(**SIZES).save_pretrained(dense)
    by_compressed_tensors(dense, made, scheme, {})
    expected = AutoModelForCausalLM.from_pretrained(made).generate(tiny.prompt(7), **OPTIONS)
    for draft in ("none", "exit:2", "lookup"):
        spec = selfspec.load(made, draft=draft)
        assert not any(isinstance(each, PackedWeight) for each in spec.model.parameters())
        assert torch.equal(spec.generate(tiny.prompt(7), **OPTIONS).sequences, expected)
