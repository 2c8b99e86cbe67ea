"""Decodes text with the checkpoint classes that people download, tiny and random, and writes the table of them.

python -m helpers.checkpoints                               # all of them, on the terminal
python -m helpers.checkpoints qwen2_vl gemma3               # some
python -m helpers.checkpoints --write ../docs/checkpoints.md   # all of them, into the table
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

import selfspec
from helpers.shrunken import PAD, shrunken
from helpers.snippets import run_types
from selfspec.errors import DraftConfigError, UnsupportedModelError

_TEXT_NAMES = """
bloom cohere2 deepseek_v2 deepseek_v3 ernie4_5 exaone4 falcon falcon_h1 gemma2 gemma3_text gemma4_text glm4 glm4_moe
gpt2 gpt_neox gpt_oss granite granitemoehybrid hunyuan_v1_dense jamba kimi_linear lfm2 llama mamba mamba2 minimax_m2
mistral mixtral nemotron nemotron_h olmo2 olmo3 opt phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss
smollm3 stablelm starcoder2
"""
TEXT = tuple(_TEXT_NAMES.split())
"""Types whose checkpoints are causal LMs."""

_MULTIMODAL_NAMES = """
aria aya_vision cohere2_vision deepseek_vl ernie4_5_vl_moe exaone4_5 fuyu gemma3 gemma3n gemma4 glm4v glm4v_moe glm_ocr
got_ocr2 granite_docling granite_speech hunyuan_vl idefics2 idefics3 internvl kimi_k25 lfm2_vl lighton_ocr llama4
llava llava_next llava_next_video llava_onevision minicpmv4_6 mistral3 mllama molmo2 ovis2 paddleocr_vl paligemma
phi4_multimodal qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr
qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe smolvlm step3p7 unlimited_ocr video_llama_3 vipllava voxtral
"""
MULTIMODAL = tuple(_MULTIMODAL_NAMES.split())
"""Types whose checkpoints also read images, video or sound."""

_OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
# Text alone: no id is that of an image.
_WORDS = (3, 40)


def checkpoint(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A tiny random model of the class of a type's checkpoints, in float32."""
    auto = AutoModelForMultimodalLM if model_type in MULTIMODAL else AutoModelForCausalLM
    return shrunken(model_type, torch.float32, seed, auto)


def verdict(model: PreTrainedModel) -> str:
    """What decoding text with it comes to: "equal", or "refused because ..."."""
    try:
        spec = selfspec.wrap(model)
    except UnsupportedModelError as error:
        return f"refused because {error}"
    ragged = spec.adapter.ragged != "none"
    prompts = torch.randint(*_WORDS, (2 if ragged else 1, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompts)
    if ragged:
        mask[1, :4], prompts[1, :4] = 0, PAD
    # Each row alone: some models count padding as text.
    alone = (row[None, -used:] for row, used in zip(prompts, mask.sum(1).tolist(), strict=True))
    try:
        wanted = torch.cat([model.generate(row, **_OPTIONS)[:, row.shape[1] :] for row in alone])
    except (AttributeError, TypeError) as error:
        return f"cannot be compared: model.generate itself raises {type(error).__name__} ({error})"
    differing = [draft for draft in ("", "exit:2", "lookup", "int8") if not _equal(spec, draft, prompts, mask, wanted)]
    return f"DIFFERS with {', '.join(map(repr, differing))}" if differing else "equal" + ("" if ragged else ", one row")


def _equal(spec: selfspec.SelfSpeculative, draft: str, prompts: Tensor, mask: Tensor, wanted: Tensor) -> bool:
    drafting = None
    # Not every model has layers that kernels in fewer bits take.
    with suppress(DraftConfigError):
        drafting = spec.drafting(draft or None, 3)
    if drafting is None:
        return True
    return torch.equal(drafting.generate(prompts, mask, **_OPTIONS).sequences[:, prompts.shape[1] :], wanted)


def line(model_type: str) -> str:
    model = checkpoint(model_type)
    inside = model.config.get_text_config(decoder=True).model_type
    return f"| {model_type} | {type(model).__name__} | {'' if inside == model_type else inside} | {verdict(model)} |"


def table(lines: Iterable[str]) -> str:
    listed = list(lines)
    equal = sum("| equal" in each for each in listed)
    body = "\n".join(listed)
    return f"""# Checkpoint classes

The classes of the checkpoints that people download most, causal LMs and models that also read images, video or sound,
of `transformers` {transformers.__version__}: each built tiny from its own config class with random weights, and given
text alone. "equal": greedy text in float32 is that of `model.generate` token by token, without a draft and with drafts
from an exit, by look-ups and in 8 bits, in a batch that is padded on the left. Written by
`cd tests && python -m helpers.checkpoints --write ../docs/checkpoints.md`.

{equal} of {len(listed)} are equal. [Architectures](architectures.md) lists all causal LMs.

| type | class | language model inside | text alone |
|---|---|---|---|
{body}

## Images, video and sound in a prompt

Pass what the processor gives: `spec.generate(**processor(...), max_new_tokens=64)`. A model needs no adapter of its own
if its language model has one: the layers are found inside. The stock model reads the prompt with its images, as its
own `generate` does, and selfspec goes on from the keys, values and states that it leaves. Before that, what the layers
get for the last token of the prompt is compared with what the stock model would give them; where more than an offset of
the position ids differs, the call is refused by name. `token_type_ids` and the like are accepted where they change
nothing that a layer gets. A server, and a model loaded within a budget, read text alone.
"""


def _run(name: str) -> tuple[str, bool]:
    said = line(name)
    return said, "DIFFERS" not in said


if __name__ == "__main__":
    sys.exit(run_types(__doc__, TEXT + MULTIMODAL, _run, table))
