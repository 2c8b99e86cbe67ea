"""Greedy texts of real checkpoints in float32, with every kind of draft, are those of `model.generate`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch

from helpers.engines import Real
from real.checkpoints import read_prompts

pytestmark = pytest.mark.real

# Tokens of a text; the larger vocabulary is the slower one.
NEW = {"smollm2": 24, "gemma3": 12}
# On every prompt.
ALWAYS = ("int8", "lookup+recycle")
# In turns, each on several prompts. Drafts that are made first are those of test_commands.py.
IN_TURNS = (
    "exit:{half}",
    "exit:{last}",
    "skip:attn={half}",
    "skip:mlp={half}",
    "skip:layers={half}",
    "int4",
    "int8+exit:{last}",
    "lookup",
    "suffix",
    "recycle",
    "lookup+int8",
    "union:suffix+recycle+int8",
    "tree recycle",
    "tree int8",
)
DEPTHS = {"smollm2": 30, "gemma3": 18}


def cases() -> list[Any]:
    found: list[Any] = []
    for model, depth in DEPTHS.items():
        turns = cycle(IN_TURNS)
        for number, line in enumerate(read_prompts()):
            draft = next(turns).format(half=depth // 2, last=depth - 1)
            found.append(pytest.param(model, line["prompt"], draft, id=f"{model}-{line['kind']}-{number}"))
    return found


@pytest.mark.parametrize(("model", "prompt", "draft"), cases())
def test_a_text_is_that_of_generate(real: Callable[[str], Real], model: str, prompt: str, draft: str) -> None:
    checkpoint = real(model)
    ids = checkpoint.ids(prompt)
    expected = checkpoint.stock(ids, NEW[model])
    for name in (*ALWAYS, draft):
        spec = checkpoint.drafting(name)
        out = spec.generate(ids, torch.ones_like(ids), max_new_tokens=NEW[model], do_sample=False)
        assert out.sequences[0, ids.shape[1] :].tolist() == expected, name


@pytest.mark.parametrize("draft", ["int8", "lookup+recycle", "exit:15"])
def test_a_seed_gives_the_same_text_with_every_draft(real: Callable[[str], Real], draft: str) -> None:
    checkpoint = real("smollm2")
    ids = checkpoint.ids("Name three rivers.")
    drawn: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.8,
        "seed": 3,
        "accept": "coupled",
        "max_new_tokens": NEW["smollm2"],
    }
    expected, found = (
        checkpoint.drafting(name).generate(ids, torch.ones_like(ids), **drawn).sequences for name in ("none", draft)
    )
    assert torch.equal(expected, found)
