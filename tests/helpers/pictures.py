"""Tiny models that read images, and a prompt with an image for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForMultimodalLM, PreTrainedModel

from helpers.shrunken import shrunken

_IMAGE, _VIDEO, _START = 40, 41, 42

_BY_GRID = ("glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl")
"""Types that take an image as patches and their grid, and count positions by it."""

PICTURED = (*_BY_GRID, "gemma3", "llava")
"""Types that there is a prompt for."""


@dataclass(frozen=True)
class Pictured:
    """A tiny random model in float32, and what a processor gives for a prompt with an image."""

    model: PreTrainedModel
    inputs: dict[str, Any]

    @property
    def ids(self) -> Tensor:
        """The prompt, `[1, tokens]`."""
        ids: Tensor = self.inputs["input_ids"]
        return ids


def pictured(model_type: str, seed: int = 0) -> Pictured:
    """The model of a type, with its prompt."""
    generator = torch.Generator().manual_seed(seed)
    tokens: dict[str, Any] = {"image_token_id": _IMAGE, "image_token_index": _IMAGE}
    if model_type in _BY_GRID:
        tokens |= {"video_token_id": _VIDEO, "vision_start_token_id": _START, "image_start_token_id": _START}
    if model_type == "gemma3":
        tokens["mm_tokens_per_image"] = 4
    model = shrunken(model_type, torch.float32, auto=AutoModelForMultimodalLM, **tokens)
    vision = model.config.vision_config
    if model_type in _BY_GRID:
        pixels = torch.randn(24, 3 * vision.temporal_patch_size * vision.patch_size**2, generator=generator)
        ids = torch.tensor([[5, 6, _START, *[_IMAGE] * 6, 43, 8, 9, 10]])
        beside = {"image_grid_thw": torch.tensor([[1, 4, 6]]), "mm_token_type_ids": (ids == _IMAGE).int()}
        return Pictured(model, {"input_ids": ids, "pixel_values": pixels, **beside})
    pixels = torch.randn(1, 3, vision.image_size, vision.image_size, generator=generator)
    count = 4 if model_type == "gemma3" else (vision.image_size // vision.patch_size) ** 2
    ids = torch.tensor([[5, 6, *[_IMAGE] * count, 8, 9, 10]])
    beside = {"token_type_ids": (ids == _IMAGE).int()} if model_type == "gemma3" else {}
    return Pictured(model, {"input_ids": ids, "pixel_values": pixels, **beside})
