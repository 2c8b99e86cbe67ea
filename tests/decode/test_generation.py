"""A generation that is continued in another mode of torch than it began in, or abandoned."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import permutations

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.shrunken import shrunken
from selfspec.decode.generation import Generation

NEW = 9
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": nullcontext,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
}
CHANGES = [*(pair for pair in permutations(MODES, 2) if "inference" in pair), ("grad", "no grad"), ("no grad", "grad")]
DRAFTS = (None, "exit:2", "int8", "recycle")


def begun(spec: selfspec.SelfSpeculative) -> Generation:
    prompt = tiny.prompt(9)
    return spec.stream(prompt, torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, pad_token_id=0)


def taken(generation: Generation, rounds: int) -> list[int]:
    return [token for _, committed in zip(range(rounds), generation, strict=False) for token in committed.tokens]


def modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@pytest.fixture(scope="module", params=["llama", "lfm2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny.llama() if request.param == "llama" else shrunken(request.param)


@pytest.mark.parametrize("draft", DRAFTS)
def test_it_may_begin_in_one_mode_and_go_on_in_another(model: PreTrainedModel, draft: str | None) -> None:
    prompt = tiny.prompt(9)
    wanted = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    spec = selfspec.wrap(model, draft, draft_length=3)
    around = modes()
    for first, then in CHANGES:
        with MODES[first]():
            inside = modes()
            generation = begun(spec)
            tokens = taken(generation, 1)
            assert modes() == inside
        with MODES[then]():
            inside = modes()
            tokens += taken(generation, 1)
            assert modes() == inside
        tokens += taken(generation, NEW)
        assert modes() == around
        assert tokens == wanted[0, 9:].tolist(), (first, then)
        assert torch.equal(generation.output().sequences, wanted)


@pytest.mark.parametrize("draft", [None, "int8"])
@pytest.mark.parametrize("leave", [Generation.close, lambda _: None], ids=["closed", "dropped"])
def test_it_may_be_left_in_another_mode_than_it_began_in(
    model: PreTrainedModel, draft: str | None, leave: Callable[[Generation], None]
) -> None:
    spec = selfspec.wrap(model, draft, draft_length=3)
    wanted = taken(begun(spec), NEW)
    for first, then in CHANGES:
        with MODES[first]():
            generation = begun(spec)
            taken(generation, 1)
        with MODES[then]():
            inside = modes()
            leave(generation)
            del generation
            gc.collect()
            assert modes() == inside
            # What the wrapper keeps serves in either mode.
            assert taken(begun(spec), NEW) == wanted
