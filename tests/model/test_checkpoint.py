"""Loading checkpoints: what is wrong with a folder is said by name; and the fingerprint of weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

import selfspec
from helpers import tiny
from helpers.drafting import assert_alike
from helpers.saved_folders import checkpoint_folder
from selfspec.errors import CheckpointError, PromptError, UnsupportedModelError, UnsupportedOptionError
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.summary import describe
from selfspec.model import checkpoint
from selfspec.model.checkpoint import DtypeName, find_device, read_config
from selfspec.model.identity import fingerprint, vocabulary_size, weight_of
from selfspec.serve.row_request import RowRequest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(checkpoint_folder(), copy)
    return copy


def load(folder: Path) -> None:
    load_checkpoint(str(folder), device="cpu")


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), ("float64", torch.float64), ("bfloat16", torch.bfloat16), ("float16", torch.float16)],
)
def test_loads_in_the_dtype_asked_for(folder: Path, dtype: DtypeName, expected: torch.dtype) -> None:
    checkpoint = load_checkpoint(str(folder), dtype, "cpu")
    assert checkpoint.model.dtype == expected
    assert not checkpoint.model.training
    assert checkpoint.tokenizer("Once upon").input_ids == [1, 403, 407]
    weights = load_file(folder / "model.safetensors")
    embedding = checkpoint.model.get_input_embeddings().weight
    assert torch.equal(embedding, weights["model.embed_tokens.weight"].to(expected))


def test_auto_is_the_checkpoints_own_dtype(folder: Path) -> None:
    change(folder / "config.json", dtype="bfloat16")
    assert load_checkpoint(str(folder), device="cpu").model.dtype == torch.bfloat16


def test_small_weights_load_without_a_progress_bar(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(folder)
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled()


def test_sharded_weights(folder: Path) -> None:
    model = load_checkpoint(str(folder), device="cpu").model
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="600KB")
    load(folder)
    shard = folder / "model-00002-of-00002.safetensors"
    cut(shard, -8)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is truncated or corrupt"):
        load(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 weight files: model-00002-of-00002\.safetensors; copy"):
        load(folder)


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json; give the folder of a"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not readable JSON .* copy it"),
    "config no object": (lambda f: (f / "config.json").write_text("[]"), "does not hold a JSON object"),
    "config binary": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "config.json is not readable JSON"),
    "no model_type": (lambda f: change(f / "config.json", model_type=None), "names no model_type"),
    "wrong field": (lambda f: change(f / "config.json", num_hidden_layers="five"), "config.json .* cannot be used"),
    "generation config": (lambda f: (f / "generation_config.json").write_text("{"), "generation_config.json is not"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer .*save_pretrained"),
    "empty tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer .* cannot be loaded .* copy"),
    "tokenizer no JSON": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer .* cannot be loaded"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"has no weights \(model.safetensors\); copy them"),
    "truncated": (lambda f: cut(f / "model.safetensors", -1000), "is truncated or corrupt .* download it again"),
    "cut in the header": (lambda f: cut(f / "model.safetensors", 100), "is truncated or corrupt"),
    "empty weights": (lambda f: cut(f / "model.safetensors", 0), "is truncated or corrupt"),
    "not safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "is truncated or corrupt"),
    "Git LFS": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "Git LFS pointer .* `git lfs pull`",
    ),
    "pickles": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        r"pickles only \(pytorch_model.bin\).*convert them once.*save_pretrained",
    ),
    "too few tensors": (
        lambda f: change(f / "config.json", num_hidden_layers=6),
        "9 tensors .* are missing .*layers.5",
    ),
    "other shapes": (lambda f: change(f / "config.json", hidden_size=128), "47 tensors .* are of another shape"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder(folder: Path, damage: str) -> None:
    damaging, message = DAMAGES[damage]
    damaging(folder)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("openai-gpt", "architecture 'openai-gpt' is not supported: it has no key-value cache"),
        ("no_such_architecture", r"no adapter for architecture 'no_such_architecture'; .*selfspec\.Adapter"),
    ],
)
def test_an_architecture_without_adapter_is_refused_before_weights_are_looked_at(
    folder: Path, model_type: str, message: str
) -> None:
    change(folder / "config.json", model_type=model_type)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=message):
        load(folder)


@pytest.mark.parametrize("name", ["none", "./none", "a/b/c", "none/"])
def test_a_folder_that_does_not_exist(tmp_path: Path, name: str) -> None:
    given = str(tmp_path / name) if name == "none" else name
    with pytest.raises(CheckpointError, match=r"does not exist; give a folder with config\.json"):
        read_config(given)
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        read_config(__file__)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RepositoryNotFoundError, "no public model of this name"),
        (GatedRepoError, "hf auth login"),
        (RemoteEntryNotFoundError, "has no config.json"),
        (OfflineModeIsEnabled, "HF_HUB_OFFLINE"),
        (HFValidationError, "no name on the model hub"),
        (OSError, r"no folder 'org/model' here, and the model hub .*no route.*check the path"),
    ],
)
def test_what_the_hub_refuses_is_said(monkeypatch: pytest.MonkeyPatch, error: type[Exception], said: str) -> None:
    asked = mock.Mock(side_effect=OSError("no route") if error is OSError else error.__new__(error))
    monkeypatch.setattr(checkpoint, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(checkpoint, "get_hf_file_metadata", asked)
    with pytest.raises(CheckpointError, match=said):
        read_config("org/model")
    # Once, not six times.
    assert asked.call_count == 1


def test_a_model_of_the_hub_is_loaded_from_its_folder_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    there, commit = tmp_path / "models--org--model", "a" * 40
    shutil.copytree(checkpoint_folder(), there / "snapshots" / commit)
    (there / "refs").mkdir()
    (there / "refs" / "main").write_text(commit)
    model = load_checkpoint("org/model", device="cpu").model
    assert Path(model.name_or_path) == there / "snapshots" / commit
    with pytest.raises(CheckpointError, match="org/other cannot be downloaded"):
        checkpoint.downloaded("org/other")


def test_no_code_of_a_checkpoint_is_run(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    change(folder / "config.json", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]})
    load(folder)
    change(folder / "config.json", model_type="evil")
    with pytest.raises(UnsupportedModelError, match=r"'evil' is code that the checkpoint brings.*trust_remote_code"):
        load(folder)


def test_an_empty_prompt_begins_with_the_bos_token(folder: Path) -> None:
    checkpoint = load_checkpoint(str(folder), device="cpu")
    for adds in (True, False):
        checkpoint.tokenizer.add_bos_token = adds
        assert checkpoint.encode("").tolist() == [[checkpoint.tokenizer.bos_token_id]]
    checkpoint.tokenizer.bos_token = None
    with pytest.raises(PromptError, match="no bos token to start from; give some text"):
        checkpoint.encode("")


def test_devices() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for absent in ("cuda:99", "meta"):
        with pytest.raises(UnsupportedOptionError, match="choose cpu"):
            find_device(absent)
    with pytest.raises(UnsupportedOptionError, match="'nowhere' is no device; choose cpu"):
        find_device("nowhere")


def test_a_device_without_float64_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, empty = tiny.llama(), torch.empty
    model.save_pretrained(tmp_path)

    def without_doubles(*sizes: Any, **options: Any) -> Any:
        if options.get("dtype") == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", without_doubles)
    for refused in (
        lambda: find_device("cpu"),
        lambda: selfspec.wrap(model),
        lambda: selfspec.load(tmp_path, "1GiB", device="cpu"),
    ):
        with pytest.raises(UnsupportedOptionError, match="'cpu' has no float64, in which drafts are drawn and judged"):
            refused()


def _rows_swapped(model: PreTrainedModel) -> None:
    weight = model.get_input_embeddings().weight
    weight[[11, 999]] = weight[[999, 11]]


def _adapter_merged(model: PreTrainedModel) -> None:
    weight = model.model.layers[1].self_attn.q_proj.weight
    down, up = (torch.randn(2, size, generator=torch.Generator().manual_seed(size)) for size in weight.shape)
    weight += 1e-2 * weight.abs().mean() * (down.T @ up).to(weight)


CHANGES: dict[str, Callable[[PreTrainedModel], object]] = {
    "value": lambda model: model.get_input_embeddings().weight[1234, 5].mul_(1.5),
    "rows swapped": _rows_swapped,
    "adapter merged": _adapter_merged,
    "buffer": lambda model: model.model.layers[1].packed[3, 4].add_(1),
    "last byte": lambda model: model.model.layers[1].packed[-1, -1].add_(1),
}


def _model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """With a head of its own and packed weights as quantised checkpoints have them, of an odd number of bytes."""
    model = tiny.llama(vocab_size=20_000, dtype=dtype)
    packed = torch.randint(0, 255, (7, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    model.model.layers[1].register_buffer("packed", packed)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_a_weight_makes_another(change: str, dtype: torch.dtype) -> None:
    model = _model(dtype)
    before = fingerprint(model)
    assert fingerprint(_model(dtype)) == before
    with torch.no_grad():
        CHANGES[change](model)
    assert fingerprint(model) != before


def test_a_checkpoint_has_one_in_whatever_dtype_it_is_loaded(tmp_path: Path) -> None:
    model = tiny.llama(dtype=torch.bfloat16)
    before = fingerprint(model)
    model.save_pretrained(tmp_path)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert fingerprint(type(model).from_pretrained(tmp_path, dtype=dtype)) == before


def test_rounded_weights_are_others_where_that_counts() -> None:
    model = tiny.llama(dtype=torch.float32)
    before = [fingerprint(model, dtype) for dtype in (torch.bfloat16, torch.float32)]
    model.to(torch.bfloat16).float()
    after = [fingerprint(model, dtype) for dtype in (torch.bfloat16, torch.float32)]
    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_another_adapter_that_runs_makes_another() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny.llama(), config, "one")
    model.add_adapter("two", config)
    found = []
    for name in ("one", "two"):
        model.set_adapter(name)
        found.append(fingerprint(model.get_base_model()))
    with model.disable_adapter():
        found.append(fingerprint(model.get_base_model()))
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scale_layer(0.5)
    found.append(fingerprint(model.get_base_model()))
    found.append(fingerprint(model.merge_and_unload()))
    assert len({*found}) == len(found)


def test_what_is_made_while_it_runs_does_not_count() -> None:
    model = tiny.llama()
    before = fingerprint(model)
    model.model.layers[0].register_buffer("scratch", torch.rand(3), persistent=False)
    model(tiny.prompt(4))
    assert fingerprint(model) == before


def test_weights_that_are_not_there_are_refused() -> None:
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="bias is not in memory"):
        fingerprint(layer)


class CastOutput(nn.Sequential):
    """Gives logits in float32, as PEFT's cast of outputs does."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states).float()  # type: ignore[no-any-return, no-untyped-call]


class Wrapped(nn.Module):
    """Runs what it wraps, and has no weight of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: Tensor) -> Tensor:
        return self.inner(given)  # type: ignore[no-any-return]


WRAPS: dict[str, Callable[[PreTrainedModel], None]] = {
    "head": lambda model: model.set_output_embeddings(CastOutput(model.get_output_embeddings())),
    "embedding": lambda model: model.set_input_embeddings(Wrapped(model.get_input_embeddings())),
}


@pytest.mark.parametrize("draft", [None, "exit:2", "skip:attn=1", "int8", "int4+exit:2", "lookup"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_wrapped_embeddings_and_heads_decode_as_ever(wrap: str, draft: str | None) -> None:
    model = tiny.llama()
    WRAPS[wrap](model)
    assert_alike(selfspec.wrap(model, draft, draft_length=3), inputs=tiny.prompt(9), max_new_tokens=16, do_sample=False)


@pytest.mark.parametrize("wrap", WRAPS)
def test_sizes_are_those_of_what_is_wrapped(wrap: str) -> None:
    plain, model = tiny.llama(), tiny.llama()
    WRAPS[wrap](model)
    assert vocabulary_size(model) == vocabulary_size(plain)
    for get in ("get_input_embeddings", "get_output_embeddings"):
        assert weight_of(getattr(model, get)()).shape == getattr(plain, get)().weight.shape
    assert describe(model).vocabulary == plain.config.vocab_size
    with selfspec.Engine(selfspec.wrap(model, "lookup")) as engine:
        request = RowRequest(tuple(tiny.prompt(9)[0].tolist()), 4)
        assert len(engine.submit(request).tokens()) == 4


def test_a_module_without_weights_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="Identity has no weight"):
        weight_of(nn.Identity())
