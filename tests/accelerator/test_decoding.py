"""On the stand-in for an accelerator: the model's own text by every draft, one wait a round, nothing left behind."""

from __future__ import annotations

import gc
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import published_heads, tiny, tiny_joint
from helpers.accelerator.device import Accelerator
from helpers.captures import ticking
from helpers.joints import Warp, holm_rejects, p_value
from helpers.serving import assert_joining_rows_are_stock, small
from selfspec.draft.registry import parse_draft
from selfspec.runtime.graph_cache import GraphCache

pytestmark = pytest.mark.accelerator

NEW = 14
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
SAMPLED: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.8,
    "top_k": 9,
    "seed": 1,
    "accept": "block",
    "eos_token_id": None,
}
# Sizes that kernels for fewer bits take.
SIZES = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128, "vocab_size": 64}
NAMES = ["none", "exit:1", "skip:attn=1", "int8", "int4", "lookup", "recycle", "suffix", "lookup+exit:1", "assistant"]
TREES = ["exit:1", "recycle", "suffix", "union:suffix+recycle+exit:1"]


def model_on(accelerator: Accelerator, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = tiny.llama(**SIZES, **options).to(accelerator.device)
    return model


def draft_named(name: str, accelerator: Accelerator) -> Any:
    if name == "assistant":
        return selfspec.drafts.Assistant(model_on(accelerator, seed=1))
    return parse_draft(name)


def prompts(accelerator: Accelerator, rows: int) -> Tensor:
    """Texts that repeat themselves, so that there is something to look up."""
    return tiny.prompt(4, rows, vocabulary=20).repeat(1, 3).to(accelerator.device)


def assert_one_wait(spec: selfspec.SelfSpeculative, accelerator: Accelerator, ids: Tensor, most: int = 1) -> None:
    """Check greedy text against the model's, and how often rounds wait, greedily and sampled."""
    expected = spec.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **GREEDY)
    for options in (GREEDY, SAMPLED):
        generation = spec.stream(ids, torch.ones_like(ids), max_new_tokens=NEW, **options)
        next(generation)
        while True:
            with accelerator.counted() as counts:
                committed = next(generation, None)
            if committed is None:
                break
            assert counts.waits <= most, counts.waited
        if options is GREEDY:
            assert torch.equal(generation.output().sequences, expected)


def captured(model: PreTrainedModel, name: str, ids: Tensor) -> GraphCache:
    """Check greedy text of passes that are captured, and give their programs."""
    runtime = selfspec.runtime.CudaGraphs(after=0, bucket=32)
    spec = selfspec.wrap(model, parse_draft(name), draft_length=3, runtime=runtime)
    spec.programs = GraphCache(spec.runtime, ticking())
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **GREEDY)
    for _ in range(2):
        assert torch.equal(spec.generate(ids, max_new_tokens=NEW, **GREEDY).sequences, expected)
    assert not spec.programs.refusals
    return spec.programs


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("name", "length"),
    [*((name, 3) for name in NAMES), *((name, selfspec.FixedLength(3, nodes=7)) for name in TREES)],
    ids=str,
)
def test_greedy_text_is_the_models_own_and_a_round_waits_once(
    accelerator: Accelerator, name: str, length: int | selfspec.FixedLength, rows: int
) -> None:
    model, draft = model_on(accelerator), draft_named(name, accelerator)
    spec = selfspec.wrap(model, draft, draft_length=length, runtime=selfspec.runtime.Eager())
    # What is put beside tokens that the model drew depends on them, and so does the shape of the tree.
    assert_one_wait(spec, accelerator, prompts(accelerator, rows), most=2 if name.startswith("union") else 1)


@pytest.mark.parametrize("rows", [1, 2])
def test_keys_are_chosen_without_a_wait_and_read_by_captured_passes(accelerator: Accelerator, rows: int) -> None:
    model = model_on(accelerator, max_position_embeddings=256)
    ids, name = prompts(accelerator, rows).repeat(1, 12), "exit:1+top:128"
    spec = selfspec.wrap(model, name, draft_length=3, runtime=selfspec.runtime.Eager())
    assert_one_wait(spec, accelerator, ids)
    assert any(kind.path.view.top_keys == 128 for kind in captured(model, name, ids).proved)


@pytest.mark.parametrize("kind", published_heads.FAMILIES)
def test_heads_draft_without_a_wait_of_their_own(accelerator: Accelerator, tmp_path: Path, kind: str) -> None:
    model, draft = published_heads.with_head(kind, tmp_path)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.to(accelerator.device)
    ids = prompts(accelerator, 2).clamp(max=19)
    spec = selfspec.wrap(model, draft, draft_length=3, runtime=selfspec.runtime.Eager())
    if kind.startswith("mtp"):
        # Its experts are chosen by values, and whoever chooses them waits.
        options = {"max_new_tokens": NEW, "attention_mask": torch.ones_like(ids), **GREEDY}
        assert torch.equal(spec.generate(ids, **options).sequences, model.generate(ids, **options))
        return
    assert_one_wait(spec, accelerator, ids)


@pytest.mark.parametrize("name", ["none", "exit:1", "int8"])
def test_passes_are_captured_and_give_the_models_own_text(accelerator: Accelerator, name: str) -> None:
    assert captured(model_on(accelerator), name, prompts(accelerator, 1)).proved


@pytest.mark.parametrize("name", ["exit:1", "recycle"])
def test_where_memory_runs_out_the_model_is_as_it_was_and_the_next_call_is_right(
    accelerator: Accelerator, name: str
) -> None:
    model, ids = model_on(accelerator), prompts(accelerator, 2)
    spec = selfspec.wrap(model, parse_draft(name), draft_length=3, runtime=selfspec.runtime.Eager())
    options: dict[str, Any] = {"max_new_tokens": 5, **GREEDY}
    # Until nothing more is learnt from this text, so that every call asks for as much.
    for _ in range(3):
        with accelerator.counted() as counts:
            expected = spec.generate(ids, **options).sequences.tolist()
    state = {key: value.data_ptr() for key, value in model.state_dict().items()}
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    every = max(counts.allocations // 12, 1)
    for number in count(1, every):
        if number > counts.allocations:
            break
        before = accelerator.allocated
        with accelerator.counted():
            accelerator.fails_at = number
            with pytest.raises(torch.OutOfMemoryError):
                spec.generate(ids, **options)
            accelerator.fails_at = None
            gc.collect()
        assert accelerator.allocated == before
        assert {key: value.data_ptr() for key, value in model.state_dict().items()} == state
        assert [module.__dict__.get("forward") for module in model.modules()] == forwards
    assert spec.generate(ids, **options).sequences.tolist() == expected


# Joined by others, and drawn from the joint.


def test_rows_that_join_and_leave_are_what_they_are_alone(accelerator: Accelerator) -> None:
    spec = selfspec.wrap(small().to(accelerator.device), "recycle", draft_length=2, runtime=selfspec.runtime.Eager())
    assert_joining_rows_are_stock(spec, [(1, 2, 3), (4, 5), (6, 7, 8, 9)])


def test_sampled_text_follows_the_joint(accelerator: Accelerator) -> None:
    warp, on_host = Warp(temperature=0.8), tiny_joint.network()
    joint = tiny_joint.joint(on_host, warp)
    ids = torch.tensor([tiny_joint.PROMPT] * 1500).to(accelerator.device)
    options: dict[str, Any] = {
        "max_new_tokens": tiny_joint.TOKENS,
        "eos_token_id": None,
        "pad_token_id": 0,
        **warp.options,
    }
    found = {}
    for rule, length in (("token", selfspec.FixedLength(2, nodes=4)), ("block", 2), ("coupled", 2)):
        model, runtime = tiny_joint.network().to(accelerator.device), selfspec.runtime.Eager()
        spec = selfspec.wrap(model, "exit:1", draft_length=length, accept=rule, runtime=runtime)
        drawn = spec.generate(ids, torch.ones_like(ids), seed=1, **options).sequences[:, len(tiny_joint.PROMPT) :]
        found[rule] = p_value(map(tuple, drawn.tolist()), joint)
    assert holm_rejects(found, 0.01) == []
