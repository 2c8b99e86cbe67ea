"""Generate by a recipe, for the `custom_generate/generate.py` of a saved folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from selfspec.api import wrap
from selfspec.decode.output import GenerateOutput
from selfspec.recipe import Recipe


def generate_by(
    recipe: str,
    model: PreTrainedModel,
    inputs: Tensor | None,
    generation_config: GenerationConfig | None,
    options: Mapping[str, Any],
) -> GenerateOutput | Tensor:
    """Generate as `model.generate` does, drafting by a recipe in JSON; prompts and sequences are `[batch, length]`.

    Options are its keywords, and `seed`, `draft_length` and `accept`; `input_ids` among them replaces `inputs`.
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
    chosen = Recipe.read(recipe)
    spec = wrap(model, draft=chosen.drafter, draft_length=chosen.draft_length, accept=chosen.accept)
    return spec.stream(prompt, generation_config=generation_config, inputs=inputs, **given).answer()
