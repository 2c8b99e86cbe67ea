"""How much one generation may take, where memory has a budget."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.cache.shared_layer import CacheKind
from selfspec.errors import PromptError


@dataclass(frozen=True)
class Limits:
    """Tokens that memory was set aside for.

    Attributes:
        context: prompts and texts, of all rows of a batch together.
        at_once: tokens of prompts that one pass reads, of all rows together.
        cache: how keys and values are kept.
    """

    context: int
    at_once: int
    cache: CacheKind = "exact"

    def check(self, rows: int, tokens: int) -> None:
        """Refuse what the cache has no room for.

        Args:
            rows: of the batch.
            tokens: of the longest prompt, and `max_new_tokens`.

        Raises:
            PromptError: it is too much.
        """
        if rows * tokens > self.context:
            raise PromptError(
                f"{rows} x {tokens} tokens (rows x prompt and max_new_tokens) are beyond the {self.context} that the "
                f"memory budget has room for; ask for fewer new tokens, or raise context to {rows * tokens}"
            )

    def prefill_width(self, rows: int) -> int:
        """Tokens of each row that one pass over prompts may read."""
        return max(self.at_once // rows, 1)
