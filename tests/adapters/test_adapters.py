"""Declared architectures: each declaration fits the stock model, drafting changes no token, and wrong ones are seen."""

from __future__ import annotations

import importlib
import pkgutil
import runpy
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import selfspec
import selfspec.adapters
from helpers import tiny
from helpers.contract import CHECKS, Subject
from helpers.reference import layers_of
from helpers.snippets import ROOT, snippets
from selfspec.adapters import ADAPTERS
from selfspec.adapters.refused import BEFORE_5_21
from selfspec.architecture import Adapter

EXIT = selfspec.drafts.EarlyExit(3)
SKIP = selfspec.drafts.LayerSkip(attention=[2], mlp=[1])


def declared() -> list[Adapter]:
    """What each file declares but those of refusals and of what checkpoints have beside their layers."""
    names = {file.name for file in pkgutil.iter_modules(selfspec.adapters.__path__)} - {"refused", "mtp"}
    return [importlib.import_module(f"selfspec.adapters.{name}").ADAPTER for name in sorted(names)]


def test_every_file_declares_an_adapter_that_is_found_once() -> None:
    adapters = declared()
    for adapter in adapters:
        assert adapter.model_types
        known = set(adapter.model_types) - BEFORE_5_21.keys()
        assert all(ADAPTERS[model_type] is adapter for model_type in known)
    assert sum(len(adapter.model_types) for adapter in adapters) == len(ADAPTERS) + len(BEFORE_5_21)


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
    _assert_exact(tiny.BUILDERS[architecture](**options), prompt=9)


LONGROPE = _rope("longrope", short_factor=[1.0] * 4, long_factor=[8.0] * 4, original_max_position_embeddings=24)


@pytest.mark.parametrize("prompt", [2, 10, 26, 40])
def test_longrope_is_exact_on_either_side_of_the_original_context(prompt: int) -> None:
    _assert_exact(tiny.llama(**LONGROPE), prompt)
    other = tiny.llama(**{**LONGROPE, "rope_parameters": {**LONGROPE["rope_parameters"], "long_factor": [1.0] * 4}})
    prompts = tiny.prompt(prompt)
    differs = not torch.equal(tiny.llama(**LONGROPE)(prompts).logits, other(prompts).logits)
    assert differs == (prompt > 24)


@pytest.mark.parametrize("prompt", [11, 20, 24, 25])
def test_longrope_is_refused_where_a_text_crosses_the_original_context(prompt: int) -> None:
    for draft in (None, EXIT):
        with pytest.raises(selfspec.errors.UnsupportedOptionError, match=r"longrope.* 24 tokens"):
            selfspec.wrap(tiny.llama(**LONGROPE), draft, draft_length=4).generate(
                tiny.prompt(prompt), max_new_tokens=14
            )


def test_longrope_is_refused_where_rows_lie_on_different_sides() -> None:
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :36] = 0
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="longrope"):
        selfspec.wrap(tiny.llama(**LONGROPE)).generate(tiny.prompt(40, 2), mask, max_new_tokens=2)


def test_dynamic_tables_are_exact_up_to_the_context_beyond_which_no_request_goes() -> None:
    model = tiny.llama(**_rope("dynamic"), max_position_embeddings=24)
    _assert_exact(model, prompt=10)
    with pytest.raises(selfspec.errors.PromptError, match="context of 24"):
        selfspec.wrap(model, EXIT, draft_length=4).generate(tiny.prompt(11), max_new_tokens=14)


def _assert_exact(model: PreTrainedModel, prompt: int) -> None:
    prompts = tiny.prompt(prompt)
    wanted = model.generate(prompts, max_new_tokens=14, do_sample=False)
    for draft in (None, EXIT, SKIP):
        out = selfspec.wrap(model, draft, draft_length=3).generate(prompts, max_new_tokens=14, do_sample=False)
        assert out.sequences.tolist() == wanted.tolist()


@pytest.mark.contract
@pytest.mark.parametrize("folder", ["stories260K", "stories3M", "bitllama3M", "pycode10M"])
def test_a_trained_checkpoint_gives_the_text_of_plain_decoding(checkpoints: FilePath, folder: str) -> None:
    text = "def add(a, b):\n" if folder == "pycode10M" else "Once upon a time there was a little"
    if not (checkpoints / folder).is_dir():
        pytest.skip(f"no checkpoint {folder}")
    model = AutoModelForCausalLM.from_pretrained(checkpoints / folder, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(checkpoints / folder)(text, return_tensors="pt").input_ids
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    wanted = model.generate(tokens, **options)
    depth = len(layers_of(model))
    for draft in (
        selfspec.drafts.EarlyExit(depth - 1),
        selfspec.drafts.LayerSkip(layers=[depth // 2]),
        selfspec.drafts.LayerSkip(attention=[depth // 2], mlp=[depth - 2]),
    ):
        out = selfspec.wrap(model, draft, draft_length=4).generate(tokens, **options)
        assert out.sequences.tolist() == wanted.tolist()
        assert out.stats.acceptance_rate > 0.2


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
