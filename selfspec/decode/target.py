"""The target: the model that verifies, with the state that its generations share."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.shared_layer import CacheKind
from selfspec.errors import PromptError
from selfspec.model.substitutes import Substitutes
from selfspec.model.vocabulary import weight_of
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.recorded import runner_for
from selfspec.runtime.runner import ModelRunner


@dataclass(frozen=True)
class Limits:
    """Numbers of tokens that memory is reserved for.

    Attributes:
        context: tokens of prompts and texts, over all rows of a batch.
        at_once: tokens of prompts that one pass reads, over all rows.
        cache: how keys and values are kept.
    """

    context: int
    at_once: int
    cache: CacheKind = "exact"

    def check(self, rows: int, tokens: int) -> None:
        """Refuse a batch that the cache has no room for.

        Args:
            rows: of the batch.
            tokens: of the longest prompt plus `max_new_tokens`.

        Raises:
            PromptError: the batch has too many tokens.
        """
        if rows * tokens > self.context:
            raise PromptError(
                f"{rows} x {tokens} tokens (rows x prompt and max_new_tokens) are beyond the {self.context} that the "
                f"memory budget has room for; ask for fewer new tokens, or raise context to {rows * tokens}"
            )

    def prefill_width(self, rows: int) -> int:
        """Return how many tokens of each row one pass over prompts may read."""
        return max(self.at_once // rows, 1)


@dataclass(frozen=True)
class Target:
    """A wrapped model, as generations run it.

    Attributes:
        model: the stock model.
        adapter: where its layers are.
        programs: passes recorded so far.
        substitutes: its weights in fewer bits, made so far.
        memories: state of drafters that lives as long as the wrapper.
        limits: of each call under a memory budget; None: there is no budget.
    """

    model: PreTrainedModel
    adapter: Adapter
    programs: GraphCache
    substitutes: Substitutes
    memories: dict[Hashable, object]
    limits: Limits | None

    @property
    def device(self) -> torch.device | None:
        """Device of token ids and logits; None: all weights are offloaded, and the prompt's device is used."""
        device: torch.device = weight_of(self.model.get_input_embeddings()).device
        return None if device.type == "meta" else device

    def cache(self, rows: int, limit: int, slack: int, device: torch.device) -> SharedCache:
        """Make a cache for rows of up to `limit` committed tokens, and `slack` more for drafts."""
        kept = "exact" if self.limits is None else self.limits.cache
        bucket = self.programs.bucket
        return self.adapter.shared_cache(self.model, rows, limit, slack, device=device, bucket=bucket, kept=kept)

    def runner(self, cache: SharedCache) -> ModelRunner:
        """Make a runner of passes over a cache."""
        return runner_for(self.model, self.adapter, cache, self.programs, self.substitutes)
