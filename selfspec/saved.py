"""Generate by a recipe, for the `custom_generate/generate.py` of a saved folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from selfspec.api import wrap
from selfspec.decode.output import GenerateOutput


def generate_by(
    recipe: Mapping[str, Any],
    model: PreTrainedModel,
    inputs: Tensor | None,
    generation_config: GenerationConfig | None,
    options: Mapping[str, Any],
) -> GenerateOutput | Tensor:
    """Generate as `model.generate` does; prompts and sequences are `[batch, length]`.

    The recipe has arguments of `selfspec.wrap`. Options are keywords of `model.generate`, and `seed`, `draft_length`
    and `accept`; `input_ids` among them replaces `inputs`.
    """
    given = dict(options)
    if given.get("custom_generate") is not None:
        # Another recipe was asked for by name; the class's own `generate` finds it.
        answer: GenerateOutput | Tensor = type(model).generate(
            model, inputs, generation_config=generation_config, **given
        )
        return answer
    given.pop("trust_remote_code", None)
    prompt = given.pop("input_ids", None)
    return wrap(model, **recipe).stream(prompt, generation_config=generation_config, inputs=inputs, **given).answer()
