"""Rotary tables that change with the length of a text: which requests stay where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

from selfspec.errors import UnsupportedOptionError


def check_rotary(config: PreTrainedConfig, prompts: Sequence[int], max_new_tokens: int) -> None:
    """Refuse a request in which a pass would rotate otherwise than the passes before it.

    Args:
        config: of the model; of its text part, if it has several.
        prompts: length of each prompt.
        max_new_tokens: the most tokens each may grow by.

    Raises:
        UnsupportedOptionError: naming the length that must not be crossed.
    """
    # The prefill leaves out a prompt's last token.
    boundary = tables_change(config, min(prompts) - 1, max(prompts) + max_new_tokens)
    if boundary is not None:
        raise UnsupportedOptionError(
            f"rotary tables of type 'longrope' change at {boundary} tokens, which this request of {max(prompts)} + "
            f"{max_new_tokens} tokens crosses, so that a block is not exact; lower max_new_tokens"
            + ("" if max(prompts) < boundary else " or shorten the prompt")
        )


def tables_change(config: PreTrainedConfig, first: int, total: int) -> int | None:
    """Where passes over a text, one after the other, would rotate otherwise than one over the whole.

    Args:
        config: as above.
        first: tokens of the first pass.
        total: tokens of the text.

    Returns:
        The length that they cross; None: they cross none.
    """
    for table in _tables(config):
        # The other type that changes, `dynamic`, does so beyond the model's context only, where no request goes.
        if table.get("rope_type") == "longrope" and first <= table["original_max_position_embeddings"] < total:
            return int(table["original_max_position_embeddings"])
    return None


def _tables(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary parameters: of the whole model, or of each layer type."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
