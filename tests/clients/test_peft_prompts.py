"""Soft prompts of peft: `p.generate(custom_generate=spec)` gives what p's own passes over the whole text give.

Not what `p.generate` alone gives: with the renamed caches of transformers 5.24, peft 0.21 puts the soft prompt before
each new token again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    LoraConfig,
    MultitaskPromptTuningConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.saved_folders import installed  # noqa: F401 - a fixture
from selfspec.compat import OUTPUT_CACHE

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
]

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
METHODS: dict[str, Callable[[], Any]] = {
    "prompt tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": lambda: PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
    "multitask": lambda: MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, num_tasks=2),
    "prefix tuning": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "projected prefix": lambda: PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=16
    ),
}
ARCHITECTURES = ("llama", "gpt2", "mistral", "qwen2")


def prompted(method: str, model: PreTrainedModel) -> PeftModel:
    """The model with a random soft prompt, large enough to change the text."""
    torch.manual_seed(1)
    found: PeftModel = get_peft_model(model, METHODS[method]()).to(model.dtype).eval()
    for parameter in found.prompt_encoder.parameters():
        torch.nn.init.normal_(parameter, std=1.0)
    return found


def exiting(model: PreTrainedModel) -> selfspec.SelfSpeculative:
    return selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)


def check_padded(wrapped: PeftModel, model: PreTrainedModel) -> None:
    """Each row is what it is without its padding."""
    ids = tiny.prompt(5, 2)
    out = wrapped.generate(input_ids=ids, attention_mask=MASK, custom_generate=exiting(model), **GREEDY)
    for row, text, padding in zip(out, ids, (MASK == 0).sum(1), strict=True):
        assert torch.equal(row[None, padding:], forced(wrapped, text[None, padding:])[0])


def tasks(method: str, rows: int) -> dict[str, Tensor]:
    return {"task_ids": torch.arange(rows)} if method == "multitask" else {}


def forced(wrapped: PeftModel, ids: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What the passes of peft's model give greedily, each over the whole text: ids and the logits of the new ones."""
    logits = []
    for _ in range(GREEDY["max_new_tokens"]):
        logits.append(wrapped(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[:, -1])
        ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], 1)
    return ids, torch.stack(logits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("method", METHODS)
def test_a_soft_prompt_is_read(method: str, architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    ids = tiny.prompt(5, 2)
    base = model.generate(ids, **GREEDY)
    wrapped = prompted(method, model)
    options = {"input_ids": ids, **tasks(method, 2), **GREEDY}
    wanted, _ = forced(wrapped, ids, **tasks(method, 2))
    assert not torch.equal(wanted, base)
    for draft in (None, selfspec.drafts.EarlyExit(2), selfspec.drafts.PromptLookup(shortest=1)):
        spec = selfspec.wrap(model, draft, draft_length=3)
        assert torch.equal(wrapped.generate(custom_generate=spec, **options), wanted)
    # Outside the library's own generate there is no soft prompt.
    assert torch.equal(spec.generate(ids, **GREEDY).sequences, base)
    assert torch.equal(model.generate(ids, custom_generate=spec, **GREEDY), base)


@pytest.mark.parametrize("method", ["prefix tuning", "projected prefix"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_padding_behind_a_prefix(method: str, architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    check_padded(prompted(method, model), model)


@pytest.mark.parametrize(
    ("method", "architecture", "words"),
    [
        # It is counted as positions there, so that a row depends on how wide its batch is.
        ("prompt tuning", "llama", r"soft prompt before padded rows.*one row at a time"),
        ("p-tuning", "llama", r"soft prompt before padded rows.*one row at a time"),
        ("prefix tuning", "mistral", r"padding between.*windows.*one row at a time"),
        ("prefix tuning", "qwen2", r"padding between.*windows.*one row at a time"),
    ],
)
def test_padding_that_changes_the_text_is_refused(method: str, architecture: str, words: str) -> None:
    model = tiny.BUILDERS[architecture]()
    wrapped = prompted(method, model)
    model.register_forward_pre_hook(lambda module, args: pytest.fail("it ran"))
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match=words):
        wrapped.generate(input_ids=tiny.prompt(5, 2), attention_mask=MASK, custom_generate=exiting(model), **GREEDY)


@pytest.mark.parametrize("method", ["prompt tuning", "prefix tuning"])
def test_scores_and_caches_come_back(method: str) -> None:
    model = tiny.llama()
    wrapped = prompted(method, model)
    spec, ids = exiting(model), tiny.prompt(5)
    out = wrapped.generate(
        input_ids=ids, return_dict_in_generate=True, output_logits=True, custom_generate=spec, **GREEDY
    )
    _, logits = forced(wrapped, ids)
    torch.testing.assert_close(torch.stack(out.logits), logits.float())
    read = getattr(wrapped(input_ids=out.sequences[:, :-1], use_cache=True), OUTPUT_CACHE)
    assert out.cache.get_seq_length() == read.get_seq_length() == 3 + 5 + 11
    for own, right in zip(out.cache.layers, read.layers, strict=True):
        torch.testing.assert_close(own.keys, right.keys)
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="a cache beside a soft prompt"):
        wrapped.generate(
            input_ids=torch.cat([out.sequences, tiny.prompt(3)], 1),
            cache=out.cache,
            custom_generate=spec,
            **GREEDY,
        )


@pytest.mark.parametrize("method", ["prompt tuning", "prefix tuning"])
def test_a_saved_folder_reads_the_soft_prompt(method: str, tmp_path: Path) -> None:
    exiting(tiny.llama()).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    wrapped = prompted(method, model)
    options = {"input_ids": tiny.prompt(5, 2), **GREEDY}
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    plain = prompted(method, base)
    plain.load_state_dict(wrapped.state_dict())
    assert torch.equal(wrapped.generate(**options), forced(plain, options["input_ids"])[0])


def test_lora_is_as_it_was() -> None:
    model = tiny.llama()
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).to(model.dtype).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    check_padded(wrapped, model)
