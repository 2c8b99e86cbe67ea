"""A small study of the small trained model, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.stories import checkpoint_folder
from selfspec.model.registry import find_adapter
from selfspec.tools.lab.study import StudiedModel, Study

TEXTS, PROMPT = 3, 6


def declared(**changes: Any) -> Study:
    """A study of a few seconds."""
    return Study.of(
        {
            "models": "stories",
            "drafts": ["exits", "sublayers"],
            "workloads": "given",
            "temperatures": [0.0, 1.0],
            "draft_lengths": [1, 2],
            "texts": TEXTS,
            "prompt_tokens": PROMPT,
            "max_new_tokens": 16,
            "confirm": 0,
            "pricing": "weights",
            **changes,
        }
    )


def stories_loader() -> Callable[[str], StudiedModel]:
    """What loads the model, once."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder())
    prompts = torch.randint(3, 400, (TEXTS, PROMPT), generator=torch.Generator().manual_seed(0))
    studied = StudiedModel("stories", model, find_adapter(model), {"given": prompts.split(1)}, tokenizer)
    return lambda name: studied
