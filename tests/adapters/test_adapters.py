"""Declared architectures, hybrid and recurrent ones among them: declarations fit the model, wrong ones are seen."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import selfspec
import selfspec.adapters
from helpers import tiny
from helpers.any_rounds import AnyShrunkenRounds, any_rounds
from helpers.contract import CHECKS, Subject
from helpers.drafting import assert_alike
from helpers.joints import assert_rows_are_stock
from helpers.shrunken import shrunken
from helpers.snippets import ROOT, snippets
from selfspec.adapters import ADAPTERS, DECLARED
from selfspec.adapters.refused import BEFORE_5_21
from selfspec.compat import OUTPUT_CACHE, cache_argument
from selfspec.errors import UnsupportedOptionError

EXIT = selfspec.drafts.EarlyExit(3)
SKIP = selfspec.drafts.LayerSkip(attention=[2], mlp=[1])


def test_every_type_is_declared_once_and_found() -> None:
    for adapter in DECLARED:
        assert adapter.model_types
        known = set(adapter.model_types) - BEFORE_5_21.keys()
        assert all(ADAPTERS[model_type] is adapter for model_type in known)
    assert sum(len(adapter.model_types) for adapter in DECLARED) == len(ADAPTERS) + len(BEFORE_5_21)


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **more}}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"reorder_and_upcast_attn": True, "attention": "eager", "dtype": torch.float32}),
        ("gpt2", {"scale_attn_weights": False, "tie_word_embeddings": False}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", _rope("linear")),
        ("llama", _rope("dynamic") | {"max_position_embeddings": 23}),
        ("llama", _rope("yarn", original_max_position_embeddings=8)),
        (
            "llama",
            _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8),
        ),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 2}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen2", {"max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    ],
    ids=str,
)
def test_variants_of_an_architecture_are_exact_too(architecture: str, options: dict[str, Any]) -> None:
    model = tiny.BUILDERS[architecture](**options)
    for draft in (None, EXIT, SKIP):
        spec = selfspec.wrap(model, draft, draft_length=3)
        assert_alike(spec, inputs=tiny.prompt(9), max_new_tokens=14, do_sample=False)


_RIGHT = "mlp_returns=2)"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """What the example, which asserts that its drafts are right and accepted, leaves behind: its model."""
    return runpy.run_path(str(ROOT / "examples" / "your_own_adapter.py"))


def _run(example: dict[str, Any], declared: str, blocks: slice) -> None:
    names = {"selfspec": selfspec, "torch": torch, "model": example["model"], "Subject": Subject, "CHECKS": CHECKS}
    page = snippets("docs/your_own_adapter.md", "python")
    assert _RIGHT in page[0]
    exec(page[0].replace(_RIGHT, declared), names)
    for block in page[blocks]:
        exec(block, names)


@pytest.mark.contract
def test_the_page_runs_as_printed(example: dict[str, Any]) -> None:
    _run(example, _RIGHT, slice(1, None))


@pytest.mark.parametrize("wrong", ['without_mlp="input"', 'without_mlp="residual"', 'without_attention="input"'])
def test_a_wrong_declaration_fails_the_check_of_the_draft(example: dict[str, Any], wrong: str) -> None:
    with pytest.raises(AssertionError, match="is not the pruned model"):
        _run(example, f"mlp_returns=2, {wrong})", slice(1, 2))


GREEDY: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 1}
HYBRIDS = ("jamba", "lfm2")
# They have no column of keys, so a turn is given what the cache has not read.
STATES_ALONE = ("mamba", "mamba2")

TestAnyRounds = pytest.mark.contract(any_rounds(AnyShrunkenRounds, 10, steps=8, architecture="jamba"))
TestAnyRoundsLfm2 = pytest.mark.contract(any_rounds(AnyShrunkenRounds, 10, steps=8, architecture="lfm2"))
# The torch code of these is slow.
TestAnyRoundsFalconH1 = pytest.mark.contract(any_rounds(AnyShrunkenRounds, 2, steps=8, architecture="falcon_h1"))
TestAnyRoundsQwen3Next = pytest.mark.contract(any_rounds(AnyShrunkenRounds, 3, steps=8, architecture="qwen3_next"))
# Nothing but states: no positions, no masks.
TestAnyRoundsMamba2 = pytest.mark.contract(
    any_rounds(AnyShrunkenRounds, 4, steps=8, architecture="mamba2", kernels=("eager",))
)


@pytest.mark.parametrize("architecture", ["jamba", "lfm2", "mamba2"])
def test_prompts_beside_one_of_a_single_token_leave_their_own_states(architecture: str) -> None:
    """Read nothing of a single token before the first round, so that no length is common to all rows."""
    model = shrunken(architecture)
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    prompts = [tiny.prompt(length, seed=length) for length in (1, 4, 7)]
    assert_rows_are_stock(model, spec, prompts, max_new_tokens=8, eos_token_id=None)


def test_an_mlp_that_is_not_there_cannot_be_skipped() -> None:
    with pytest.raises(selfspec.errors.DraftConfigError, match=r"mlp=\[1\].*no MLP"):
        selfspec.wrap(shrunken("mamba2"), selfspec.drafts.LayerSkip(attention=[0], mlp=[1]), draft_length=4)
    selfspec.wrap(shrunken("mamba2"), selfspec.drafts.LayerSkip(layers=[1]), draft_length=4)


# The next turn of a chat: it goes on from the cache that the last turn gave back.


def wrapped(architecture: str) -> tuple[selfspec.SelfSpeculative, PreTrainedModel]:
    model = shrunken(architecture)
    return selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3), model


def words(length: int, rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(3, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def turn(sequences: Tensor) -> Tensor:
    return torch.cat([sequences, words(4, len(sequences), seed=9)], 1)


def greedy(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The text of a fresh run, and no guess of padding."""
    text: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    return text


@pytest.mark.parametrize("architecture", [*HYBRIDS, *STATES_ALONE])
@pytest.mark.parametrize("way", ["wrapper", "transformers"])
def test_a_chat_continues(architecture: str, way: str) -> None:
    spec, model = wrapped(architecture)
    ids, past, read = words(8), None, 0
    for _ in range(3):
        wanted = greedy(model, ids)
        given = ids[:, read:] if architecture in STATES_ALONE else ids
        options = {
            "attention_mask": torch.ones_like(given),
            "return_dict_in_generate": True,
            **({} if past is None else {cache_argument(model): past}),
            **GREEDY,
        }
        out = spec.generate(given, **options) if way == "wrapper" else None
        if out is None:
            out = model.generate(given, custom_generate=spec, **options)
        assert torch.equal(out.sequences[:, given.shape[1] :], wanted[:, ids.shape[1] :])
        past, read = out.cache, wanted.shape[1] - 1
        assert past is not None
        ids = turn(wanted)


@pytest.mark.parametrize("architecture", ["jamba", "mamba2"])
def test_a_stock_cache_is_taken_up_and_a_callers_own_is_filled(architecture: str) -> None:
    spec, model = wrapped(architecture)
    first = model.generate(words(8, 2), return_dict_in_generate=True, attention_mask=torch.ones(2, 8), **GREEDY)
    more = turn(first.sequences)
    given = more[:, 16:] if architecture in STATES_ALONE else more
    wanted = greedy(model, more)[:, more.shape[1] :]
    mask = torch.ones_like(given)
    out = spec.generate(given, mask, cache=getattr(first, OUTPUT_CACHE), **GREEDY)
    assert torch.equal(out.sequences[:, given.shape[1] :], wanted)
    assert out.cache is getattr(first, OUTPUT_CACHE)
    empty = DynamicCache(config=model.config)
    assert spec.generate(words(8, 2), cache=empty, **GREEDY).cache is empty
    again = spec.generate(given, mask, cache=empty, **GREEDY)
    assert torch.equal(again.sequences[:, given.shape[1] :], wanted)


def test_states_of_rows_that_end_apart_are_not_given() -> None:
    spec, model = wrapped("jamba")
    ids = words(8, 2)
    text = greedy(model, ids)
    ends = next(int(token) for token in text[0, 10:] if int(token) not in text[1, 8:].tolist())
    options = {"attention_mask": torch.ones(2, 8), "eos_token_id": ends, **GREEDY}
    out = spec.generate(ids, return_dict_in_generate=True, **options)
    assert out.lengths[0] < out.lengths[1]
    assert out.cache is None
    with pytest.raises(UnsupportedOptionError, match=r"several rows of a recurrent model.*one row at a time"):
        spec.generate(ids, cache=DynamicCache(config=model.config), **options)


def test_a_cache_of_other_layers_is_refused() -> None:
    jamba, lfm2 = shrunken("jamba"), shrunken("mamba2")
    past = getattr(jamba.generate(words(8), return_dict_in_generate=True, **GREEDY), OUTPUT_CACHE)
    lfm2.register_forward_pre_hook(lambda module, args: pytest.fail("it ran"))
    spec = selfspec.wrap(lfm2, selfspec.drafts.EarlyExit(2), draft_length=3)
    with pytest.raises(
        UnsupportedOptionError, match=r"4 layers of LinearAttentionLayer, DynamicLayer.*has 4 of Linear"
    ):
        spec.generate(words(20), cache_params=past, **GREEDY)
