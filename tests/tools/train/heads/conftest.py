"""What heads are trained on."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from helpers import tiny
from selfspec.tools.train.corpus import Blocks


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The target; a module of tests may have another."""
    return tiny.llama()


@pytest.fixture(scope="module")
def text(model: PreTrainedModel) -> Blocks:
    """What the model itself says, greedily, so that there is something to learn."""
    ids = torch.cat([tiny.prompt(3, seed=seed) for seed in range(6)])
    return Blocks.of(model.generate(ids, max_new_tokens=13, do_sample=False, eos_token_id=None, pad_token_id=0))
