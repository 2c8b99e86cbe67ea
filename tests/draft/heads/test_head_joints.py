"""Sampled drafts of heads: the exact joint, batches whose rows end, rows that join and leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import selfspec
from helpers import published_heads, tiny
from helpers.goodness import holm_rejects
from helpers.joints import EOS, VOCAB, Warp, p_values, small
from helpers.serving import Stepped
from helpers.tiers import taking_turns
from selfspec.serve.row_request import RowRequest, SamplingParams

CONTROLS = (2, selfspec.FixedLength(2, nodes=5))
RULES = ("token", "block", "coupled")
WARPS = (Warp(temperature=0.7), Warp(temperature=1.4, top_k=4, top_p=0.9))


def wrapped(folder: Path, kind: str, **options: Any) -> selfspec.SelfSpeculative:
    """A model of five tokens that drafts with a head."""
    if kind == "mtp2":
        made = published_heads.mtp(folder, "glm4_moe", modules=2, vocab_size=VOCAB)
        return selfspec.wrap(made.model, "mtp", **options)
    model = small()
    return selfspec.wrap(model, written(folder, kind, model), **options)


def written(folder: Path, kind: str, model: Any) -> str:
    if kind == "eagle1":
        return f"eagle:{published_heads.eagle1(folder, model)}"
    if kind == "hydra":
        return f"hydra:{published_heads.hydra(folder, model)}"
    if kind == "uno":
        return f"uno:{published_heads.uno(folder, model)}"
    if kind == "dflash":
        return f"dflash:{published_heads.dflash(folder, model)}"
    points: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    if kind == "peagle":
        return f"peagle:{published_heads.peagle(folder, model, **points)}"
    return f"eagle:{published_heads.eagle3(folder, model, **points)}"


@pytest.mark.statistical
@pytest.mark.parametrize("control", CONTROLS, ids=str)
@pytest.mark.parametrize("kind", ["eagle3", "mtp2"])
def test_samples_follow_the_exact_joint(tmp_path: Path, kind: str, control: Any) -> None:
    spec = wrapped(tmp_path, kind, draft_length=control)
    assert holm_rejects(p_values(spec, Warp(), EOS), 0.01) == []


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("kind", "rule", "control"), taking_turns(["hydra", "peagle", "dflash", "mtp2"], RULES, CONTROLS)
)
def test_twenty_thousand_samples_of_other_heads(tmp_path: Path, kind: str, rule: str, control: Any) -> None:
    spec = wrapped(tmp_path, kind, draft_length=control, accept=rule)
    warp = Warp(temperature=1.4, top_k=4, top_p=0.9)
    assert holm_rejects(p_values(spec, warp, EOS, batches=40), 0.01) == []


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("kind", "rule", "warp", "control"), taking_turns(["eagle1", "eagle3"], RULES, WARPS, CONTROLS)
)
def test_twenty_thousand_samples_follow_the_exact_joint(
    tmp_path: Path, kind: str, rule: str, warp: Warp, control: Any
) -> None:
    spec = wrapped(tmp_path, kind, draft_length=control, accept=rule)
    assert holm_rejects(p_values(spec, warp, EOS, batches=40), 0.01) == []


def test_coupled_samples_are_those_of_plain_decoding(tmp_path: Path) -> None:
    model = tiny.llama()
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "eos_token_id": 7, "pad_token_id": 0, "seed": 3}
    plain = selfspec.wrap(model, None, accept="coupled").generate(tiny.prompt(9, 3), **options)
    draft = written(tmp_path, "eagle3", model)
    spec = selfspec.wrap(model, draft, accept="coupled", draft_length=selfspec.FixedLength(3, nodes=7))
    assert torch.equal(spec.generate(tiny.prompt(9, 3), **options).sequences, plain.sequences)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "hydra", "peagle", "dflash", "mtp2", "uno"])
@pytest.mark.parametrize("control", CONTROLS, ids=str)
def test_rows_that_join_and_leave_are_what_they_are_alone(tmp_path: Path, kind: str, control: Any) -> None:
    spec = wrapped(tmp_path, kind, draft_length=control)
    engine = Stepped(spec, 4, 8)
    prompts = [(1, 2, 3), (2,), (3, 1, 4, 1), (2, 2, 1, 3, 1, 4, 2, 3, 1, 1), (4, 4), (1, 3)] * 2
    seen, expected = [], []
    for number, prompt in enumerate(prompts):
        new = 3 + 2 * number
        sampling = SamplingParams(temperature=0.0) if number % 3 else SamplingParams(temperature=1.0, seed=number)
        seen.append(engine.submit(RowRequest(prompt, new, sampling)))
        options: dict[str, Any] = {"do_sample": number % 3 == 0, "max_new_tokens": new, "eos_token_id": None}
        alone = selfspec.wrap(spec.model, None, accept="coupled").generate(
            torch.tensor([prompt]), seed=number, **options
        )
        expected.append(alone.sequences[0, len(prompt) :].tolist())
    engine.run()
    assert [list(each.tokens) for each in seen] == expected
