"""Checkpoints that quantising libraries make and save: text is the library's own, in as many bytes as it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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


def by_compressed_tensors(dense: Path, made: Path, bits: int, group: int) -> None:
    library = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    config = QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
        ignore=["lm_head"],
        format="pack-quantized",
    )
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    apply_quantization_config(model, config)
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            groups = module.weight.detach().unflatten(1, (-1, group))
            scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
            module.weight_scale.data.copy_(scales)
    compressor = library.ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")
    compressor.compress_model(model)
    model.save_pretrained(made)
    compressor.update_config(made)


@pytest.mark.parametrize(
    ("make", "how"),
    [
        *((by_bitsandbytes, (kind, rounded)) for kind in ("nf4", "fp4") for rounded in (False, True)),
        # With zeros, transformers 5.24 does not load what the library packs.
        *((by_compressed_tensors, (bits, group)) for bits in (4, 8) for group in (32, 64)),
    ],
)
def test_text_is_the_librarys_own(tmp_path: Path, make: Any, how: tuple[Any, Any]) -> None:
    dense, made = tmp_path / "dense", tmp_path / "made"
    tiny.llama(**SIZES).save_pretrained(dense)
    make(dense, made, *how)
    stock: PreTrainedModel = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    expected = stock.generate(tiny.prompt(7), **OPTIONS)
    for draft in ("none", "exit:2", "lookup+int8"):
        spec = selfspec.load(made, dtype="float32", draft=draft)
        assert torch.equal(spec.generate(tiny.prompt(7), **OPTIONS).sequences, expected)
    packed = [each for each in spec.model.parameters() if isinstance(each, PackedWeight)]
    assert len(packed) == 7 * tiny.DEPTH
    held = sum(each.nbytes for each in spec.model.parameters())
    assert held <= 1.02 * sum(file.stat().st_size for file in made.glob("*.safetensors"))
