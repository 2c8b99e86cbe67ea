"""What other libraries wrap around a model is opened; what they put into it is decoded exactly, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.errors import UnsupportedModelError

PROMPT = 7
OPTIONS: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


def test_a_compiled_model_is_wrapped_by_what_is_inside(llama: PreTrainedModel) -> None:
    wanted = llama.generate(tiny.prompt(PROMPT), **OPTIONS)
    compiled: Any = torch.compile(llama, backend="eager")
    spec = selfspec.wrap(compiled, selfspec.drafts.EarlyExit(2), draft_length=3)
    assert spec.model is llama
    assert torch.equal(spec.generate(tiny.prompt(PROMPT), **OPTIONS).sequences, wanted)
    assert torch.equal(compiled.generate(tiny.prompt(PROMPT), custom_generate=spec, **OPTIONS), wanted)


def test_what_is_inside_a_compiled_module_must_be_a_causal_model() -> None:
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    with pytest.raises(UnsupportedModelError, match="Linear is not a transformers model"):
        selfspec.wrap(compiled)


def quantised(model: PreTrainedModel, dtype: torch.dtype) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=dtype)


def test_a_pass_with_activations_in_8_bits_depends_on_its_other_tokens() -> None:
    """Why such models are refused: no draft could be verified without changing the text."""
    model = quantised(tiny.llama(dtype=torch.float32), torch.qint8)
    with torch.no_grad():
        alone, together = (model(tiny.prompt(9)[:, :width]).logits[0, 0] for width in (1, 9))
    assert (alone - together).abs().max() > 0.01


def test_dynamic_quantisation_to_8_bits_is_refused() -> None:
    model = tiny.llama(dtype=torch.float32)
    early = selfspec.wrap(model, selfspec.drafts.EarlyExit(2))
    with pytest.raises(UnsupportedModelError, match=r"q_proj is a .*dynamic.*by the largest of all tokens in a pass"):
        selfspec.wrap(quantised(model, torch.qint8), selfspec.drafts.EarlyExit(2))
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)
    with pytest.raises(UnsupportedModelError, match=r"quantise the weights alone"):
        early.generate(tiny.prompt(PROMPT), **OPTIONS)


def test_dynamic_quantisation_to_16_bits_is_decoded() -> None:
    model = quantised(tiny.llama(dtype=torch.float32), torch.float16)
    wanted = model.generate(tiny.prompt(PROMPT, 2), **OPTIONS)
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    output = spec.generate(tiny.prompt(PROMPT, 2), **OPTIONS)
    assert torch.equal(output.sequences, wanted)
    assert output.stats.drafted > 0
