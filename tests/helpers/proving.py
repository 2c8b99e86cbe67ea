"""What tests of programs share: a clock by which every program proves itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.runtime import Runtime
from selfspec.runtime.graph_cache import GraphCache


def ticking() -> Callable[[], float]:
    """A clock by which all things take the same time, and each reading a little less than the one before.

    So a program, timed after the stock modules, always takes less.
    """
    ticks = threading.local()

    def now() -> float:
        # Threads beside each other must not take each other's time.
        passed: int = getattr(ticks, "passed", 0) + 1
        ticks.passed = passed
        return 1.0 - 1.0 / passed

    return now


def wrapped(
    model: PreTrainedModel, runtime: Runtime, draft: selfspec.drafts.Drafter | None = None
) -> selfspec.SelfSpeculative:
    """Wrap a model so that every program proves itself, by a clock that is `ticking`."""
    spec = selfspec.wrap(model, draft, draft_length=3, runtime=runtime)
    spec.programs = GraphCache(runtime, ticking())
    return spec


def assert_stock(spec: selfspec.SelfSpeculative, ids: Tensor, max_new_tokens: int) -> None:
    """Greedy text is the model's own."""
    found = spec.generate(ids, max_new_tokens=max_new_tokens, do_sample=False).sequences
    assert found.tolist() == spec.model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False).tolist()


def ragged_samples(spec: selfspec.SelfSpeculative, prompt: int, max_new_tokens: int) -> list[list[int]]:
    """Samples of three rows of different lengths, `prompt` tokens the longest."""
    prompts = torch.cat([tiny.prompt(prompt, seed=seed) for seed in range(3)])
    mask = torch.ones_like(prompts)
    mask[1, :3] = 0
    mask[2, :1] = 0
    output = spec.generate(prompts, mask, max_new_tokens=max_new_tokens, do_sample=True, seed=1)
    tokens: list[list[int]] = output.sequences.tolist()
    return tokens
