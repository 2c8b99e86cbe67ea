"""Adapters of PEFT: what they put into a model is wrapped with it, and what they do not is refused by name.

Soft prompts: `p.generate(custom_generate=spec)` gives what p's own passes over the whole text give. Not what
`p.generate` alone gives: with the renamed caches of transformers 5.24, peft 0.21 puts the soft prompt before each new
token again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.saved_folders import installed  # noqa: F401 - a fixture
from selfspec.errors import UnsupportedModelError

pytestmark = [
    pytest.mark.clients,
    # PEFT asks transformers by a name that this one still knows.
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),
]
peft = pytest.importorskip("peft", reason="peft is not installed")

PROMPT = 7
OPTIONS: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}
CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}


def adapted(config: Any, model: PreTrainedModel | None = None) -> Any:
    """A tiny model with an adapter that changes its text."""
    model = tiny.llama() if model is None else model
    plain = model.generate(tiny.prompt(PROMPT), **OPTIONS)
    wrapper = peft.get_peft_model(model, config).eval()
    noise = torch.Generator().manual_seed(1)
    for weight in wrapper.parameters():
        if weight.requires_grad:
            weight.data = (0.3 * torch.randn(weight.shape, generator=noise)).to(weight.dtype)
    changed = wrapper.generate(input_ids=tiny.prompt(PROMPT), **OPTIONS)
    assert not torch.equal(changed, plain)
    return wrapper


def lora(**options: Any) -> Any:
    return peft.LoraConfig(target_modules=["q_proj", "down_proj"], **CAUSAL, **options)


INJECTED: dict[str, Any] = {
    "lora": lambda: lora(),
    "dora": lambda: lora(use_dora=True),
    "lora over the head": lambda: lora(modules_to_save=["lm_head", "embed_tokens"]),
    "lora over embeddings": lambda: peft.LoraConfig(target_modules=["q_proj", "embed_tokens", "lm_head"], **CAUSAL),
    "lora and tokens": lambda: lora(trainable_token_indices=[1, 2, 3]),
    "ia3": lambda: peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL),
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4, r=0, **CAUSAL),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], r=4, **CAUSAL),
}


@pytest.mark.parametrize("config", INJECTED.values(), ids=INJECTED)
def test_a_wrapped_adapter_gives_its_own_text(config: Any) -> None:
    wrapper = adapted(config())
    for prompts in (tiny.prompt(PROMPT), tiny.prompt(PROMPT, 3)):
        wanted = wrapper.generate(input_ids=prompts, **OPTIONS)
        spec = selfspec.wrap(wrapper, selfspec.drafts.EarlyExit(2), draft_length=3)
        assert spec.model is wrapper.get_base_model()
        output = spec.generate(prompts, **OPTIONS)
        assert torch.equal(output.sequences, wanted)
        assert output.stats.drafted > 0
        assert torch.equal(wrapper.generate(input_ids=prompts, custom_generate=spec, **OPTIONS), wanted)


@pytest.mark.parametrize(
    "draft",
    [None, selfspec.drafts.EarlyExit(2), selfspec.drafts.LowPrecision(), selfspec.drafts.LowPrecision(4)],
    ids=str,
)
def test_an_attention_that_looks_at_its_linears_runs_in_fewer_bits(draft: selfspec.drafts.Drafter | None) -> None:
    model = tiny.llama(hidden_size=64, dtype=torch.float32)
    wrapper = adapted(peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2, **CAUSAL), model)
    wanted = wrapper.generate(input_ids=tiny.prompt(PROMPT), **OPTIONS)
    spec = selfspec.wrap(wrapper, draft, draft_length=3)
    assert torch.equal(spec.generate(tiny.prompt(PROMPT), **OPTIONS).sequences, wanted)


def test_mixed_and_compiled_wrappers_are_opened(llama: PreTrainedModel) -> None:
    wrapper = adapted(lora(), llama)
    wanted = wrapper.generate(input_ids=tiny.prompt(PROMPT), **OPTIONS)
    compiled: Any = torch.compile(wrapper, backend="eager")
    assert torch.equal(selfspec.wrap(compiled).generate(tiny.prompt(PROMPT), **OPTIONS).sequences, wanted)
    mixed = peft.get_peft_model(tiny.llama(), lora(), mixed=True).eval()
    assert selfspec.wrap(mixed).model is mixed.base_model.model


def test_an_adapter_switched_between_calls_is_the_one_used() -> None:
    wrapper = adapted(lora())
    spec = selfspec.wrap(wrapper, selfspec.drafts.EarlyExit(2), draft_length=3)
    with wrapper.disable_adapter():
        wanted = wrapper.generate(input_ids=tiny.prompt(PROMPT), **OPTIONS)
        assert torch.equal(spec.generate(tiny.prompt(PROMPT), **OPTIONS).sequences, wanted)
    wanted = wrapper.generate(input_ids=tiny.prompt(PROMPT), **OPTIONS)
    assert torch.equal(spec.generate(tiny.prompt(PROMPT), **OPTIONS).sequences, wanted)


REFUSED: dict[str, Any] = {
    "LILY": lambda: peft.LilyConfig(target_modules=["q_proj"], **CAUSAL),
    "POLY": lambda: peft.PolyConfig(target_modules=["q_proj"], n_tasks=2, **CAUSAL),
    "LORA": lambda: lora(alora_invocation_tokens=[1, 2]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_cannot_be_decoded_in_blocks_are_refused(kind: str, llama: PreTrainedModel) -> None:
    early = selfspec.wrap(llama)
    wrapper = peft.get_peft_model(llama, REFUSED[kind]())
    for refused in (
        lambda: selfspec.wrap(wrapper),
        lambda: selfspec.wrap(wrapper.get_base_model()),
        lambda: early.generate(tiny.prompt(PROMPT), **OPTIONS),
    ):
        with pytest.raises(UnsupportedModelError, match=f"adapter {kind} of PEFT cannot be decoded in blocks"):
            refused()


def test_a_model_with_adapters_in_it_is_not_saved(tmp_path: Path) -> None:
    wrapper = adapted(lora())
    wanted = wrapper.generate(input_ids=tiny.prompt(PROMPT), **OPTIONS)
    with pytest.raises(UnsupportedModelError, match="merge_and_unload"):
        selfspec.wrap(wrapper, selfspec.drafts.EarlyExit(2)).save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    merged = selfspec.wrap(wrapper.merge_and_unload(), selfspec.drafts.EarlyExit(2))
    merged.save_pretrained(tmp_path / "model")
    loaded = type(merged.model).from_pretrained(tmp_path / "model", dtype=torch.float64)
    assert torch.equal(loaded.generate(tiny.prompt(PROMPT), **OPTIONS), wanted)


GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


METHODS: dict[str, Callable[[], Any]] = {
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, **CAUSAL),
    "multitask": lambda: peft.MultitaskPromptTuningConfig(num_virtual_tokens=3, num_tasks=2, **CAUSAL),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "projected prefix": lambda: peft.PrefixTuningConfig(
        num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=16, **CAUSAL
    ),
}
ARCHITECTURES = ("llama", "gpt2", "mistral", "qwen2")


def prompted(method: str, model: PreTrainedModel) -> Any:
    """The model with a random soft prompt, large enough to change the text."""
    torch.manual_seed(1)
    found: Any = peft.get_peft_model(model, METHODS[method]()).to(model.dtype).eval()
    for parameter in found.prompt_encoder.parameters():
        torch.nn.init.normal_(parameter, std=1.0)
    return found


def forced(wrapped: Any, ids: Tensor, **inputs: Tensor) -> Tensor:
    """Decode greedily by passes of peft's model, each over the whole text."""
    for _ in range(GREEDY["max_new_tokens"]):
        logits = wrapped(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("method", METHODS)
def test_a_soft_prompt_is_read(method: str, architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    ids = tiny.prompt(5, 2)
    base = model.generate(ids, **GREEDY)
    wrapped = prompted(method, model)
    # It is no part of the model.
    kind = METHODS[method]().peft_type.value
    with pytest.raises(UnsupportedModelError, match=rf"\({kind}\).*peft_model\.generate\("):
        selfspec.wrap(wrapped)
    tasks = {"task_ids": torch.arange(2)} if method == "multitask" else {}
    options = {"input_ids": ids, **tasks, **GREEDY}
    wanted = forced(wrapped, ids, **tasks)
    assert not torch.equal(wanted, base)
    for draft in (None, selfspec.drafts.EarlyExit(2), selfspec.drafts.PromptLookup(shortest=1)):
        spec = selfspec.wrap(model, draft, draft_length=3)
        assert torch.equal(wrapped.generate(custom_generate=spec, **options), wanted)
    # Outside the library's own generate there is no soft prompt.
    assert torch.equal(spec.generate(ids, **GREEDY).sequences, base)
    assert torch.equal(model.generate(ids, custom_generate=spec, **GREEDY), base)
