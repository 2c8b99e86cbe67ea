"""Rotary tables that change with the length of a text, and the requests that stay within one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

from selfspec.errors import UnsupportedOptionError


def boundaries(config: PreTrainedConfig) -> list[int]:
    """List the text lengths beyond which passes use other rotary tables; few models have any.

    Here and below, the configuration is that of the text part, if a model has several parts.
    """
    # Tables of type `dynamic` change, too, but only beyond the model's context, where no request goes.
    longrope = [table for table in _tables(config) if table.get("rope_type") == "longrope"]
    return sorted({table["original_max_position_embeddings"] for table in longrope})


def check_rotary(
    config: PreTrainedConfig, prompts: Sequence[int], max_new_tokens: int, known: int = 0, width: int | None = None
) -> None:
    """Refuse a request in which a pass would use other rotary tables than the passes before it.

    Args:
        config: of the model.
        prompts: length of each prompt.
        max_new_tokens: the most tokens that each prompt may grow by.
        known: the fewest tokens of a prompt that a cache holds already and that are not read again.
        width: the most tokens of each prompt that one pass reads; None: any number.

    Raises:
        UnsupportedOptionError: naming the length that must not be crossed.
    """
    for boundary in boundaries(config):
        if max(prompts) + max_new_tokens <= boundary:
            continue
        # The prefill leaves out a prompt's last token.
        read = min(prompts) - 1
        if read <= boundary:
            raise UnsupportedOptionError(
                f"rotary tables of type 'longrope' change at {boundary} tokens, which this request of {max(prompts)} + "
                f"{max_new_tokens} tokens crosses, so that a block is not exact; lower max_new_tokens"
                + ("" if max(prompts) < boundary else " or shorten the prompt")
            )
        if width is not None and known + width <= boundary:
            raise UnsupportedOptionError(
                f"rotary tables of type 'longrope' change at {boundary} tokens, and prompts "
                f"are read {width} tokens at a time, first by other tables than later; read more at once, or shorten "
                f"prompt and max_new_tokens to {boundary} tokens together"
            )


def tables_of(config: PreTrainedConfig, length: int) -> int:
    """Return the number of the tables for a text of this length; 0: the tables of the shortest texts."""
    return sum(boundary < length for boundary in boundaries(config))


def is_outgrown(config: PreTrainedConfig, known: Sequence[int], prompts: Sequence[int]) -> bool:
    """Return whether the `known` tokens of prompts in a cache were rotated by other tables than later passes use."""
    return tables_change(config, min(known), max(prompts) - 1)


def tables_change(config: PreTrainedConfig, first: int, total: int) -> bool:
    """Return whether a pass over the `first` tokens of a text of `total` tokens uses other tables than a full pass."""
    return tables_of(config, first) != tables_of(config, total)


def _tables(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the rotary parameters: of the whole model, or of each layer type."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
