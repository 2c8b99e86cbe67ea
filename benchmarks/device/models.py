"""The models that are measured: the small trained one, and that widened to well-known sizes."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Literal, TypeVar
from weakref import finalize

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from widen import SIZES, Size, places, widened

from selfspec.errors import UnsupportedModelError
from selfspec.measure.checkpoint import Checkpoint, load_checkpoint
from selfspec.measure.embedded import DEMO, model_place
from selfspec.model.checkpoint import read_config

DTYPE = torch.bfloat16
_Made = TypeVar("_Made")


class Models:
    """Makes models on the device, in bfloat16, and holds the last one, since two may be too many.

    `small` is the folder of the trained llama that is widened; or "demo", the embedded one.
    """

    def __init__(self, device: torch.device, miniature: bool, small: str = DEMO) -> None:
        self._device = device
        self._miniature = miniature
        self._small = model_place(small)
        self._small_config = read_config(self._small)
        self._held: tuple[str, Any] = ("", None)

    def small(self, dtype: Literal["bfloat16", "float32"] = "bfloat16") -> Checkpoint:
        """Return the small trained model."""
        return self._kept(f"small {dtype}", lambda: self._loaded(dtype))

    def trained(self, shape: str) -> Checkpoint:
        """Return a model of about a shape that computes what the small trained one does, up to rounding."""
        return self._kept(f"trained {shape}", lambda: self._widened(shape))

    def eagle(self, shape: str) -> str:
        """Return the folder of a head for a trained model, of random weights: a layer behind one product, as EAGLE's.

        It is written anew for each model, and goes with this object.
        """
        config = self.trained(shape).model.config
        torch.manual_seed(0)
        layer, hidden = LlamaDecoderLayer(config, 0).to(DTYPE), config.hidden_size
        weights = {
            f"layers.0.{name}": each for name, each in layer.state_dict().items() if "input_layernorm" not in name
        }
        weights["fc.weight"] = torch.randn(hidden, 2 * hidden, dtype=DTYPE) * (2 * hidden) ** -0.5
        folder = Path(mkdtemp())
        finalize(self, rmtree, folder)
        save_file(weights, folder / "model.safetensors")
        about = {**config.to_dict(), "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(about, default=str), encoding="utf-8")
        return str(folder)

    def exit_layer(self, shape: str, share: float) -> int:
        """Return the exit of a trained model behind this share of the small model's layers."""
        own: int = self._small_config.num_hidden_layers
        return places(own, self.size(shape).layers)[max(1, round(share * own)) - 1] + 1

    def _loaded(self, dtype: Literal["bfloat16", "float32"]) -> Checkpoint:
        checkpoint = load_checkpoint(self._small, dtype=dtype, device=str(self._device))
        # Texts are as long as they are asked to be.
        checkpoint.model.generation_config.eos_token_id = None
        return checkpoint

    def _widened(self, shape: str) -> Checkpoint:
        small = self._loaded("bfloat16")
        if not isinstance(small.model, LlamaForCausalLM):
            raise UnsupportedModelError(f"{self._small} is no llama, and nothing else is widened; name another model")
        return Checkpoint(widened(small.model, self.size(shape)), small.tokenizer)

    def size(self, shape: str) -> Size:
        """Return the size that a trained model is widened to."""
        if not self._miniature:
            return SIZES[shape]
        small = self._small_config
        hidden, heads, inside = small.hidden_size, small.num_attention_heads, small.intermediate_size
        return Size(2 * hidden, 2 * heads, 2 * inside, small.num_hidden_layers + 1)

    def _kept(self, name: str, made: Callable[[], _Made]) -> _Made:
        if self._held[0] != name:
            self._held = ("", None)
            free_memory()
            self._held = (name, made())
        kept: _Made = self._held[1]
        return kept


def free_memory() -> None:
    """Give back memory of the device that nothing uses."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
