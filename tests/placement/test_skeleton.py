"""A checkpoint loaded within a budget has the tensors that `from_pretrained` gives, or is refused as it would be."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import selfspec
from helpers import tiny
from helpers.copies import plan
from helpers.quantised import FP8, float8, save_quantised
from helpers.shrunken import shrunken
from helpers.tiny import in_turns
from selfspec.adapters import ADAPTERS
from selfspec.errors import CheckpointError, UnsupportedModelError
from selfspec.model.checkpoint import load_model, read_config
from selfspec.placement.place import place
from selfspec.placement.stored import ReadBuffer
from selfspec.placement.survey import survey
from selfspec.placement.weight_source import FromDisk


def check_same_tensors(folder: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a checkpoint in both ways and compare everything; return what was loaded within a budget."""
    stock, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
    )
    # These hold random numbers.
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    surveyed = survey(str(folder), dtype, 128, FromDisk())
    streamed = surveyed.skeleton.stored.items()
    read = {name: where.read(surveyed.files).to(surveyed.dtype) for name, where in streamed}
    placed = place(surveyed, plan(len(surveyed.layers)))
    assert type(placed) is type(stock)
    assert surveyed.dtype == stock.config.dtype
    assert not placed.training
    wanted = dict(stock.named_parameters(remove_duplicate=False))
    found = dict(placed.named_parameters(remove_duplicate=False))
    assert list(found) == list(wanted)
    assert set(read) <= set(wanted)
    for name, weight in wanted.items():
        check_equal(name, found[name], weight)
        if name in read:
            check_equal(name, read[name], weight)
    assert _tied(placed) == _tied(stock)
    buffers = dict(placed.named_buffers(remove_duplicate=False))
    assert list(buffers) == [name for name, _ in stock.named_buffers(remove_duplicate=False)]
    for name, buffer in stock.named_buffers(remove_duplicate=False):
        check_equal(name, buffers[name], buffer)
    assert placed.generation_config.to_dict() == stock.generation_config.to_dict()
    assert placed.config.to_dict() == stock.config.to_dict()
    return placed


def check_equal(name: str, found: Tensor, wanted: Tensor) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
    assert torch.equal(_bits(found), _bits(wanted)), name


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _tied(model: PreTrainedModel) -> set[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), set()).add(name)
    return {frozenset(each) for each in names.values() if len(each) > 1}


_FILE = "model.safetensors"


def llama(**options: Any) -> PreTrainedModel:
    return tiny.llama(dtype=torch.float32, intermediate_size=64, **options)


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def saved(folder: Path, model: PreTrainedModel, change: Change) -> None:
    model.save_pretrained(folder)
    changed(folder, change)


def changed(folder: Path, change: Change) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(folder / _FILE)).items()}
    save_file(tensors, folder / _FILE, {"format": "pt"})


def configured(folder: Path, **fields: Any) -> None:
    """Change fields of config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def with_extra(name: str, extra: Tensor) -> Change:
    return lambda tensors: tensors | {name: extra}


def another_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}


NAMES: dict[str, tuple[Callable[[], PreTrainedModel], Change]] = {
    "as saved": (llama, lambda tensors: tensors),
    "without the prefix of the model": (lambda: llama(tie_word_embeddings=True), renamed("model.", "")),
    "without the prefix of GPT-2": (lambda: tiny.gpt2(dtype=torch.float32), renamed("transformer.", "")),
    "names of old norms": (
        lambda: shrunken("bert", torch.float32, is_decoder=True),
        lambda tensors: renamed("LayerNorm.bias", "LayerNorm.beta")(
            renamed("LayerNorm.weight", "LayerNorm.gamma")(tensors)
        ),
    ),
    "layers that the model has not": (llama, with_extra("model.layers.4.mlp.up_proj.weight", torch.ones(64, 32))),
    "a head beside the tied one": (lambda: llama(tie_word_embeddings=True), another_head),
    "a mask of booleans": (llama, with_extra("model.layers.0.attn.bias", torch.ones(1, 1, 8, 8, dtype=torch.bool))),
    "a mask of bytes": (llama, with_extra("model.layers.0.attn.bias", torch.ones(1, 1, 8, 8, dtype=torch.uint8))),
    "places": (llama, with_extra("model.embeddings.position_ids", torch.arange(8)[None])),
    "an unused number": (llama, with_extra("model.layers.0.attn.masked_bias", torch.tensor(-1e4))),
    "an empty tensor": (llama, with_extra("model.nothing", torch.zeros(0, 3))),
    "numbers that are used": (lambda: shrunken("apertus", torch.float32), lambda tensors: tensors),
    "experts": (lambda: shrunken("mixtral", torch.float32), lambda tensors: tensors),
    "weights that stay in float32": (lambda: shrunken("deepseek_v3", torch.float32), lambda tensors: tensors),
    "halves": (llama, lambda tensors: {name: tensor.half() for name, tensor in tensors.items()}),
    "several dtypes": (
        llama,
        lambda tensors: {name: tensor.half() if "norm" in name else tensor for name, tensor in tensors.items()},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), in_turns(tuple(NAMES), (None, torch.bfloat16)))
def test_names_and_dtypes(tmp_path: Path, name: str, dtype: torch.dtype | None) -> None:
    make, change = NAMES[name]
    saved(tmp_path, make(), change)
    check_same_tensors(tmp_path, dtype)


def test_what_ends_a_text_where_only_the_config_says_so(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    configured(tmp_path, eos_token_id=[3, 4], pad_token_id=5)
    assert check_same_tensors(tmp_path).generation_config.eos_token_id == [3, 4]


def test_the_dtype_is_that_of_the_first_name_where_no_config_names_one(tmp_path: Path) -> None:
    saved(tmp_path, llama(), lambda each: each | {"lm_head.weight": each["lm_head.weight"].half()})
    configured(tmp_path, dtype=None)
    assert check_same_tensors(tmp_path).dtype == torch.float16


def test_shards_and_the_dtype_of_their_index(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_same_tensors(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"]["dtype"] = "bfloat16"
    index.write_text(json.dumps(content))
    assert check_same_tensors(tmp_path).dtype == torch.float32
    configured(tmp_path, dtype=None)
    assert check_same_tensors(tmp_path).dtype == torch.bfloat16
    next(tmp_path.glob("*.safetensors")).unlink()
    check_refused(tmp_path, "lacks 1 of")


def test_weights_whose_file_the_config_names(tmp_path: Path) -> None:
    saved(tmp_path, llama(seed=1), lambda each: each)
    (tmp_path / _FILE).rename(tmp_path / "other.safetensors")
    llama().save_pretrained(tmp_path)
    configured(tmp_path, transformers_weights="other.safetensors")
    check_same_tensors(tmp_path)
    for wrong in ("../other.safetensors", "gone.safetensors"):
        configured(tmp_path, transformers_weights=wrong)
        check_refused(tmp_path, r"names weights|has no weights")


def mxfp4(folder: Path) -> None:
    """Save a gpt-oss whose experts are in 4 bits."""

    def packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found, generator = {}, torch.Generator().manual_seed(0)
        for name, tensor in tensors.items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                found[name] = tensor.bfloat16()
                continue
            experts, inner, outer = tensor.shape
            shape = (experts, outer, inner // 32)
            found[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            found[f"{name}_scales"] = torch.randint(120, 126, shape, dtype=torch.uint8, generator=generator)
        return found

    saved(folder, shrunken("gpt_oss", torch.float32, hidden_size=32, intermediate_size=32), packed)
    configured(folder, dtype="bfloat16", quantization_config={"quant_method": "mxfp4"})


def test_quantised_weights_that_the_loader_computes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    # No kernel reads blocks of 8 inputs.
    save_quantised(llama(), tmp_path, partial(float8, columns=8), {**FP8, "weight_block_size": [16, 8]})
    check_same_tensors(tmp_path)
    spec = selfspec.load(tmp_path, "8GiB", device="cpu", draft=False)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path).generate(tiny.prompt(6), max_new_tokens=8, do_sample=False)
    assert torch.equal(spec.generate(tiny.prompt(6), max_new_tokens=8, do_sample=False).sequences, wanted)


def test_experts_in_4_bits_are_kept_as_they_lie(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    mxfp4(tmp_path)
    made = survey(str(tmp_path), None, 128, FromDisk()).skeleton
    kept = {name.rpartition(".")[2] for name, each in made.deferred.items() if each.packed is not None}
    assert kept == {"gate_up_proj", "down_proj"}
    spec = selfspec.load(tmp_path, "8GiB", device="cpu", draft=False)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path).generate(tiny.prompt(6), max_new_tokens=8, do_sample=False)
    assert torch.equal(spec.generate(tiny.prompt(6), max_new_tokens=8, do_sample=False).sequences, wanted)


def test_projections_that_stay_in_float32_are_not_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", {"o_proj"})
    placed = check_same_tensors(tmp_path, torch.bfloat16)
    assert placed.get_parameter("model.layers.0.self_attn.o_proj.weight").dtype == torch.float32
    layer = survey(str(tmp_path), torch.bfloat16, 128, FromDisk()).layers[0]
    assert {module.name.rsplit(".")[-1] for module in layer} == {
        "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_a_file_of_8_bit_floats_alone(tmp_path: Path) -> None:
    saved(tmp_path, llama(), lambda each: {name: tensor.to(torch.float8_e4m3fn) for name, tensor in each.items()})
    check_same_tensors(tmp_path)
    spec = selfspec.load(tmp_path, "8GiB", device="cpu")
    assert spec.generate(tiny.prompt(6), max_new_tokens=4, do_sample=False).sequences.shape == (1, 10)


@pytest.mark.parametrize("make", [llama, lambda: shrunken("mixtral", torch.float32)], ids=["llama", "mixtral"])
def test_the_loader_reads_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], PreTrainedModel]
) -> None:
    monkeypatch.setattr(ReadBuffer, "read", lambda *_: pytest.fail("a weight was read"))
    make().save_pretrained(tmp_path)
    surveyed = survey(str(tmp_path), torch.bfloat16, 128, FromDisk())
    assert all(weight.is_meta for weight in surveyed.skeleton.model.parameters())
    # What takes memory while a weight is made counts.
    assert any(weight.nbytes_beside for weight in surveyed.skeleton.deferred.values())


def check_refused(folder: Path, message: str) -> None:
    """Both ways refuse, with a typed error that says the same."""
    said = set()
    for load in (
        lambda: load_model(str(folder), read_config(str(folder)), "auto"),
        lambda: selfspec.load(folder, "8GiB", device="cpu", draft=False),
    ):
        with pytest.raises(CheckpointError, match=message) as refused:
            load()
        said.add(str(refused.value))
    assert len(said) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: changed(
                folder, lambda each: {name: each[name] for name in each if ".layers.3." not in name}
            ),
            r"9 tensors of LlamaForCausalLM are missing.*layers\.3\.",
        ),
        (
            lambda folder: changed(folder, with_extra("model.norm.weight", torch.ones(31))),
            "1 tensors of LlamaForCausalLM are of another shape",
        ),
        (
            lambda folder: (folder / "shard-00000-model-00001-of-00001.safetensors").touch(),
            "distributed checkpoint",
        ),
    ],
)
def test_what_does_not_make_the_model_is_refused(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    llama().save_pretrained(tmp_path)
    change(tmp_path)
    check_refused(tmp_path, message)


@pytest.mark.parametrize(
    "quantisation",
    [{"quant_method": "awq", "bits": 4, "group_size": 32}, {"quant_method": "bitsandbytes", "load_in_4bit": True}],
    ids=lambda each: each["quant_method"],
)
def test_dense_weights_that_a_library_would_quantise_are_refused_within_a_budget(
    tmp_path: Path, quantisation: dict[str, Any]
) -> None:
    llama().save_pretrained(tmp_path)
    configured(tmp_path, quantization_config=quantisation)
    words = f"dense weights.* in {quantisation['quant_method']}.*without memory"
    with pytest.raises(UnsupportedModelError, match=words):
        selfspec.load(tmp_path, "8GiB", device="cpu", draft=False)


def test_a_quantised_checkpoint_without_its_library_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    configured(tmp_path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32})
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_model(str(tmp_path), read_config(str(tmp_path)), "auto")


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has an adapter.*merge_and_unload"):
        selfspec.load(tmp_path, "8GiB")


@pytest.mark.parametrize("make", [llama, lambda: shrunken("mixtral", torch.float32)], ids=["llama", "mixtral"])
def test_weights_that_the_model_changes_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], PreTrainedModel]
) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    stock = type(model).tie_weights

    def tied(self: PreTrainedModel, **options: Any) -> None:
        stock(self, **options)
        for weight in (self.lm_head.weight, *self.model.layers[1].mlp.parameters()):
            if not weight.is_meta:
                weight.data[1].mul_(2)

    monkeypatch.setattr(type(model), "tie_weights", tied)
    placed = check_same_tensors(tmp_path)
    assert torch.equal(placed.lm_head.weight[1], 2 * model.lm_head.weight[1])


@pytest.mark.contract
@pytest.mark.parametrize("model_type", sorted(set(ADAPTERS) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)))
def test_every_architecture(tmp_path: Path, model_type: str) -> None:
    model = shrunken(model_type, torch.float32)
    model.save_pretrained(tmp_path)
    if type(model.config) in AutoModelForCausalLM._model_mapping:
        check_same_tensors(tmp_path, torch.bfloat16)
    else:
        check_refused(tmp_path, "Unrecognized configuration class")
